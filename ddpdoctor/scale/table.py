"""Show the results of all runs: the table for a person, published figures beside it, and JSON.

The published figures are ResNet-50 on up to eight V100-PCIE-32G with torch 0.4.1: forward and
backward of a batch of 128 images of 3x224x224 per GPU, with DistributedDataParallel of torch and
of NVIDIA Apex. One GPU has no DDP.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from ddpdoctor.core import formatting
from ddpdoctor.core.finding import to_record
from ddpdoctor.core.formatting import TimeUnit, json_text, unit_for
from ddpdoctor.scale.causes import STRAGGLERS, Cause, cause
from ddpdoctor.scale.plan import AS_IT_IS
from ddpdoctor.scale.results import Measured, Outcome, Row, rows

# -- published figures

REFERENCE_SETTING = "ResNet-50, batch 128 a GPU, 3x224x224, V100-PCIE-32G, torch 0.4.1"


class ReferenceFigure(NamedTuple):
    """One published measurement, in milliseconds."""

    gpus: int
    ddp: str
    total: int
    """As published: forward and backward, each rounded."""
    forward: int
    backward: int
    """With the communication."""


REFERENCE_FIGURES = (
    ReferenceFigure(1, "torch", 371, 119, 252),
    ReferenceFigure(2, "torch", 433, 134, 291),
    ReferenceFigure(2, "apex", 423, 131, 291),
    ReferenceFigure(4, "torch", 438, 138, 301),
    ReferenceFigure(4, "apex", 430, 131, 299),
    ReferenceFigure(8, "torch", 450, 136, 313),
    ReferenceFigure(8, "apex", 437, 131, 306),
)


def reference_efficiency(figure: ReferenceFigure) -> float:
    """Return the efficiency relative to one GPU."""
    return REFERENCE_FIGURES[0].total / figure.total


def reference_lines(rows: Sequence[Row]) -> list[str]:
    """Return the figures as a table, with measurements of the same sizes beside them.

    Args:
        rows: The measurements, or none.
    """
    here = {
        row.size.ranks: row for row in rows if row.variant == AS_IT_IS and row.measured is not None
    }
    found = [
        f"published: {REFERENCE_SETTING}",
        "forward + backward, in ms",
        "GPUs  DDP     total  forward  backward  efficiency"
        + ("   here: ms  efficiency" if here else ""),
    ]
    for each in REFERENCE_FIGURES:
        text = (
            f"{each.gpus:>4}  {each.ddp:<5} {each.total:>7}  {each.forward:>7}  {each.backward:>8}"
            f"  {formatting.percent(reference_efficiency(each)):>10}"
        )
        row = here.get(each.gpus)
        if row is not None and row.measured is not None and each.ddp == "torch":
            measured = row.measured
            total = measured.forward + measured.backward + (measured.exposed or 0.0)
            text += (
                f"   {formatting.figures(total * 1e3):>8}  {formatting.percent(row.efficiency):>10}"
            )
        found.append(text)
    return found


# -- the table for a person

WIDTH = 80

MAX_NOISE = 0.15
"""How much slower than the fastest repeat the slowest may be."""

_BAR = 40
"""Columns of the longest bar."""

_HEAD = ("ranks", "step", "data", "forward", "backward", "optim", "other", "exposed")
_WIDTHS = (5, 6, 6, 8, 9, 7, 7, 8)
_RATE, _EFFICIENCY = 10, 13


def table_lines(rows: Sequence[Row], *, ascii_only: bool) -> Iterator[str]:
    """Yield all but the heading: table, why a size loses, what to try, bars.

    Args:
        rows: The measurements, first those of the job as it is.
        ascii_only: Whether the terminal only has ASCII.
    """
    measured = [row.measured for row in rows if row.measured is not None]
    if measured:
        yield from _table(rows, measured)
        yield ""
    yield from _sentences(rows)
    bars = list(_bar_lines(rows, ascii_only))
    if bars:
        yield ""
        yield from bars


def base_row(rows: Sequence[Row]) -> Row | None:
    """Return the row that the others are compared with."""
    return next((row for row in rows if row.is_base), None)


def row_cause(row: Row, rows: Sequence[Row]) -> Cause | None:
    """Return why a row is less efficient than the smallest size; None if unknown."""
    base = base_row(rows)
    if base is None or base.measured is None or row.measured is None or row.efficiency is None:
        return None
    outcome = next(each for each in row.outcomes if each.measured is row.measured)
    return cause(base.measured, row.measured, row.efficiency, outcome.findings)


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
        yield _row_line(row, unit)
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


def _row_line(row: Row, unit: TimeUnit) -> str:
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
    cells = [where, *(formatting.time_in(value, unit) for value in times)]
    text = "".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    text += formatting.figures(measured.rate).rjust(_RATE)
    efficiency = formatting.percent(row.efficiency)
    if row.spread is not None and not row.is_base:
        low, high = (f"{100 * each:.0f}" for each in row.spread)
        efficiency += f" {low}-{high}"
    return f"{text} {efficiency.rjust(_EFFICIENCY - 1)}"


def _sentences(rows: Sequence[Row]) -> Iterator[str]:
    base = base_row(rows)
    for row in rows:
        failure = row.failure
        if failure is not None:
            name = f", {row.variant.name}" if row.variant.name else ""
            yield from _wrapped(f"{row.size.words}{name}: {failure.failure}")
            if (failure.directory / "run.json").exists():
                yield f"  ddpdoctor report {failure.directory}"
            yield f"  its output: {failure.log}"
        elif row.variant == AS_IT_IS and not row.is_base:
            yield from _loss_sentence(row, rows)
    if base is not None:
        yield from _tried_sentences(rows)
        yield from _noise_sentence(rows)
    yield from _finding_lines(rows)


def _loss_sentence(row: Row, rows: Sequence[Row]) -> Iterator[str]:
    found = row_cause(row, rows)
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


def _tried_sentences(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the gain of the best variant at each size."""
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
        name = best.variant.name
        if gain <= 0.0:
            words = f"nothing is faster than the script as it is; next is {name}"
        elif best.spread and row.spread and best.spread[0] <= row.spread[1]:
            words = f"{name} is fastest, by {100 * gain:.0f}%, which is within the spread of the "
            words += "repeats"
        else:
            words = f"{name} is {100 * gain:.0f}% faster than the script as it is"
        yield from _wrapped(f"tried with {size.words}: {words}")


def _noise_sentence(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how far the repeats of the job as it is differ, if that is more than noise."""
    worst, where = 0.0, None
    for row in rows:
        steps = [each.measured.step for each in row.outcomes if each.measured is not None]
        if row.variant == AS_IT_IS and len(steps) > 1 and max(steps) / min(steps) - 1 > worst:
            worst, where = max(steps) / min(steps) - 1, row
    if where is not None and worst >= MAX_NOISE:
        yield from _wrapped(
            f"the repeats with {where.size.words} differ by up to {100 * worst:.0f}%: the machine "
            "is busy with something else, and so no small difference counts"
        )


def _finding_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield findings of the job as it is, but stragglers, which have their own sentence."""
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


def _bar_lines(rows: Sequence[Row], ascii_only: bool) -> Iterator[str]:
    """Draw the throughput of the job as it is, each bar up to the ideal: efficiency 100%."""
    shown = [row for row in rows if row.variant == AS_IT_IS and row.measured and row.efficiency]
    if len(shown) < 2:
        return
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    rates = [row.measured.rate for row in shown if row.measured is not None]
    base = base_row(rows)
    a_rank = base.measured.rate / base.size.ranks if base and base.measured else 0.0
    ideals = [max(rate, a_rank * row.size.ranks) for row, rate in zip(shown, rates, strict=True)]
    longest = max(ideals)
    yield f"throughput ({full}) and what is lost against the ideal ({empty})"
    for row, rate, ideal in zip(shown, rates, ideals, strict=True):
        room = max(1, round(_BAR * ideal / longest))
        filled = max(1, round(room * rate / ideal))
        bar = full * filled + empty * (room - filled)
        percent = formatting.percent(row.efficiency)
        yield f"{row.size.short:>5} {bar.ljust(_BAR)} {formatting.figures(rate)} {percent}"


# -- the results as JSON

FORMAT = 1


def document(outcomes: Sequence[Outcome], facts: dict[str, Any], *, published: bool = False) -> str:
    """Return all results as one JSON object: ``format``, the facts, ``rows`` and ``reference``.

    A row is a size and a variant: ``ranks, nodes, variant, overrides, median, efficiency, spread,
    cause, try, runs``. Times are seconds. What is unknown is null.

    Args:
        outcomes: The runs that are over.
        facts: The options of the command.
        published: Whether to add the published figures.
    """
    found = rows(outcomes)
    content: dict[str, Any] = {
        "format": FORMAT,
        **facts,
        "rows": [_row_record(each, found) for each in found],
    }
    if published:
        content["reference"] = {
            "setting": REFERENCE_SETTING,
            "figures": [
                {**each._asdict(), "efficiency": round(reference_efficiency(each), 4)}
                for each in REFERENCE_FIGURES
            ],
        }
    return json_text(content, indent=2)


def _row_record(row: Row, every: Sequence[Row]) -> dict[str, Any]:
    why = row_cause(row, every)
    return {
        "ranks": row.size.ranks,
        "nodes": row.size.nodes,
        "variant": row.variant.name,
        "overrides": row.variant.overrides,
        "base": row.is_base,
        "median": _measured_record(row.measured),
        "efficiency": row.efficiency,
        "spread": row.spread,
        "cause": None if why is None else why.name,
        "explanation": None if why is None else why.words,
        "try": [] if why is None else list(why.tries),
        "runs": [
            {
                "repeat": outcome.planned.repeat,
                "directory": str(outcome.directory),
                "log": str(outcome.log),
                "exit_status": outcome.status,
                "overrides": outcome.overrides,
                "failure": outcome.failure or None,
                "findings": [to_record(each) for each in outcome.findings],
                "measured": _measured_record(outcome.measured),
            }
            for outcome in row.outcomes
        ],
    }


def _measured_record(measured: Measured | None) -> dict[str, Any] | None:
    return None if measured is None else {**asdict(measured), "rate": measured.rate}
