"""What was measured, for a person: the table, why a size loses, what to try, bars."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from ddpdoctor.core import units
from ddpdoctor.core.units import TimeUnit, unit_for
from ddpdoctor.scale.causes import STRAGGLERS, Cause, cause
from ddpdoctor.scale.measured import Measured
from ddpdoctor.scale.outcome import Outcome, Row
from ddpdoctor.scale.plan import AS_IT_IS

WIDTH = 80

NOISE = 0.15
"""How much slower than the fastest repeat the slowest may be."""

_BAR = 40
"""Columns of the longest bar."""

_HEAD = ("ranks", "step", "data", "forward", "backward", "optim", "other", "exposed")
_WIDTHS = (5, 6, 6, 8, 9, 7, 7, 8)
_RATE, _EFFICIENCY = 10, 13


def lines(rows: Sequence[Row], *, ascii_only: bool) -> Iterator[str]:
    """Everything but the heading; each line of 80 columns at most.

    Args:
        rows: What was measured, the job as it is first.
        ascii_only: Whether the terminal can show nothing else.
    """
    measured = [row.measured for row in rows if row.measured is not None]
    if measured:
        yield from _table(rows, measured)
        yield ""
    yield from _sentences(rows)
    bars = list(_bars(rows, ascii_only))
    if bars:
        yield ""
        yield from bars


def base_of(rows: Sequence[Row]) -> Row | None:
    """The row that the others are compared with."""
    return next((row for row in rows if row.is_base), None)


def cause_of(row: Row, rows: Sequence[Row]) -> Cause | None:
    """Why a row is less efficient than the smallest size; None where that is not known."""
    base = base_of(rows)
    if base is None or base.measured is None or row.measured is None or row.efficiency is None:
        return None
    outcome = next(each for each in row.outcomes if each.measured is row.measured)
    return cause(base.measured, row.measured, row.efficiency, outcome.findings)


# -- the table


def _table(rows: Sequence[Row], measured: Sequence[Measured]) -> Iterator[str]:
    unit = unit_for(max(each.step for each in measured))
    rate = "samples/s" if any(each.samples is not None for each in measured) else "steps/s"
    head = "".join(name.rjust(width) for name, width in zip(_HEAD, _WIDTHS, strict=True))
    yield f"{head}{rate.rjust(_RATE)}{'efficiency'.rjust(_EFFICIENCY)}"
    variant = AS_IT_IS
    for row in rows:
        if row.variant != variant:
            variant = row.variant
            yield f"{variant.name}:"
        yield _line(row, unit)
    yield from _footnotes(rows, measured, unit)


def _footnotes(rows: Sequence[Row], measured: Sequence[Measured], unit: TimeUnit) -> Iterator[str]:
    yield from textwrap.wrap(
        f"times of an iteration in {unit.name}; exposed: communication that no computation hides"
        + ("" if all(each.exposed is not None for each in measured) else " (-: not known)")
        + ("; 2x8: 2 nodes with 8 ranks each" if any(row.size.nodes > 1 for row in rows) else ""),
        WIDTH,
    )
    batches = {
        row.size.short: f"{row.measured.samples:g}"
        for row in rows
        if row.variant == AS_IT_IS and row.measured is not None and row.measured.samples is not None
    }
    if len(set(batches.values())) > 1:
        words = ", ".join(f"{samples} ({size})" for size, samples in batches.items())
        yield from _wrapped(f"samples of a rank in an iteration (ranks): {words}")
    if any(outcome.overrides for row in rows for outcome in row.outcomes):
        yield from _wrapped(
            "rows under a name, and batch_size for --weak and --strong: overridden in the ranks "
            "by ddpdoctor; the script is unchanged"
        )


def _line(row: Row, unit: TimeUnit) -> str:
    measured = row.measured
    where = row.size.short
    if measured is None:
        failure = row.failure
        why = failure.failure if failure is not None else "not measured"
        room = WIDTH - _WIDTHS[0] - 2
        return f"{where.rjust(_WIDTHS[0])}  {textwrap.shorten(why, room, placeholder=' ...')}"
    times = (
        measured.step,
        measured.data,
        measured.forward,
        measured.backward,
        measured.optimizer,
        measured.other,
        measured.exposed,
    )
    cells = [where, *(units.time_in(value, unit) for value in times)]
    text = "".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    text += units.figures(measured.rate).rjust(_RATE)
    return f"{text} {_efficiency(row).rjust(_EFFICIENCY - 1)}"


def _efficiency(row: Row) -> str:
    """``86%``, with its spread over the repeats ``86% 84-88``."""
    text = units.percent(row.efficiency)
    if row.is_base or row.spread is None:
        return text
    low, high = (f"{100 * each:.0f}" for each in row.spread)
    return f"{text} {low}-{high}"


# -- sentences


def _sentences(rows: Sequence[Row]) -> Iterator[str]:
    base = base_of(rows)
    for row in rows:
        failure = row.failure
        if failure is not None:
            yield from _failure(row, failure)
        elif row.variant == AS_IT_IS and not row.is_base:
            yield from _loss(row, rows)
    if base is not None:
        yield from _tried(rows)
        yield from _noise(rows)
    yield from _found(rows)


def _failure(row: Row, failure: Outcome) -> Iterator[str]:
    name = f", {row.variant.name}" if row.variant.name else ""
    yield from _wrapped(f"{row.size.words}{name}: {failure.failure}")
    if (failure.directory / "run.json").exists():
        yield f"  ddpdoctor report {failure.directory}"
    yield f"  its output: {failure.log}"


def _loss(row: Row, rows: Sequence[Row]) -> Iterator[str]:
    found = cause_of(row, rows)
    if found is None or row.efficiency is None:
        return
    if found.name == "none":
        yield from _wrapped(f"{row.size.words}: {found.words}")
        return
    yield from _wrapped(f"{row.size.words} lose {100 * (1 - row.efficiency):.0f}%: {found.words}")
    for each in found.tries:
        yield from textwrap.wrap(
            f"try {each}", WIDTH, initial_indent="  ", subsequent_indent="      "
        )


def _tried(rows: Sequence[Row]) -> Iterator[str]:
    """Of each size, what the best of what was tried brings."""
    plain = {row.size: row for row in rows if row.variant == AS_IT_IS and row.measured}
    for size, row in plain.items():
        others = [
            each
            for each in rows
            if each.size == size and each.variant != AS_IT_IS and each.efficiency is not None
        ]
        if not others or row.efficiency is None:
            continue
        best = max(others, key=lambda each: each.efficiency or 0.0)
        gain = (best.efficiency or 0.0) / row.efficiency - 1
        yield from _wrapped(f"tried with {size.words}: {_gain(best, row, gain)}")


def _gain(best: Row, row: Row, gain: float) -> str:
    apart = not (best.spread and row.spread) or best.spread[0] > row.spread[1]
    if gain <= 0.0:
        return f"nothing is faster than the script as it is; next is {best.variant.name}"
    if not apart:
        return (
            f"{best.variant.name} is fastest, by {100 * gain:.0f}%, which is within the spread of "
            "the repeats"
        )
    return f"{best.variant.name} is {100 * gain:.0f}% faster than the script as it is"


def _noise(rows: Sequence[Row]) -> Iterator[str]:
    """How far the repeats of the job as it is are apart, where that is more than a little."""
    worst, where = 0.0, None
    for row in rows:
        steps = [each.measured.step for each in row.outcomes if each.measured is not None]
        if row.variant == AS_IT_IS and len(steps) > 1 and max(steps) / min(steps) - 1 > worst:
            worst, where = max(steps) / min(steps) - 1, row
    if where is not None and worst >= NOISE:
        yield from _wrapped(
            f"the repeats with {where.size.words} differ by up to {100 * worst:.0f}%: the machine "
            "is busy with something else, and so no small difference counts"
        )


def _found(rows: Sequence[Row]) -> Iterator[str]:
    """Findings of the job as it is, in runs that went through; a straggler has its sentence."""
    seen: dict[str, Outcome] = {}
    for row in rows:
        if row.variant == AS_IT_IS:
            for each in row.outcomes:
                for finding in each.findings if each.measured is not None else ():
                    if finding.severity.label != "info" and finding.code not in STRAGGLERS:
                        seen.setdefault(finding.code, each)
    for code, outcome in seen.items():
        yield from _wrapped(
            f"found with {outcome.planned.words}: {code}; ddpdoctor report {outcome.directory}"
        )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


# -- bars


def _bars(rows: Sequence[Row], ascii_only: bool) -> Iterator[str]:
    """Throughput of the job as it is, each bar up to the ideal: efficiency 100%."""
    shown = [row for row in rows if row.variant == AS_IT_IS and row.measured and row.efficiency]
    if len(shown) < 2:
        return
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    rates = [row.measured.rate for row in shown if row.measured is not None]
    base = base_of(rows)
    a_rank = base.measured.rate / base.size.ranks if base and base.measured else 0.0
    ideals = [max(rate, a_rank * row.size.ranks) for row, rate in zip(shown, rates, strict=True)]
    longest = max(ideals)
    yield f"throughput ({full}) and what is lost against the ideal ({empty})"
    for row, rate, ideal in zip(shown, rates, ideals, strict=True):
        room = max(1, round(_BAR * ideal / longest))
        filled = max(1, round(room * rate / ideal))
        bar = full * filled + empty * (room - filled)
        percent = units.percent(row.efficiency)
        yield f"{row.size.short:>5} {bar.ljust(_BAR)} {units.figures(rate)} {percent}"
