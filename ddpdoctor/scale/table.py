"""The table of ``ddpdoctor scale``, and the causes of lost time.

The published figures are ResNet-50 on up to eight V100-PCIE-32G with torch 0.4.1: forward and
backward of a batch of 128 images of 3x224x224 per GPU, with DistributedDataParallel of torch and
of NVIDIA Apex. The runs on one GPU do not use DDP.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ddpdoctor.core import formatting
from ddpdoctor.core.finding import Finding, to_record
from ddpdoctor.core.formatting import TimeUnit, json_text, unit_for
from ddpdoctor.core.relations import STRAGGLERS
from ddpdoctor.scale.results import AS_IT_IS, Measured, Outcome, Row, rows

# -- explain why a size is less efficient than the smallest one, and what to try


MIN_GOOD = 0.97  # Efficiency that needs no explanation
MAX_CREDIBLE = 1.1  # Efficiency above which the smallest size is not a good base

MIN_SLOWDOWN = 1.15  # Minimum slowdown of a rank on CPUs that lacks cores
MIN_SHARE = 0.3  # Minimum share of waits for a core in the loss to be its cause


@dataclass(frozen=True)
class Cause:
    """The cause of most of the loss."""

    name: str
    """For machines: ``communication``, ``data``, ``straggler``, ``cores``, ``batch``, ``compute``,
    ``other``, or ``none`` if nothing is lost."""
    words: str  # The sentence, without its subject
    tries: tuple[str, ...] = ()  # Suggestions, one per line, with the ``--try`` that measures each


NONE = Cause("none", "as efficient as the smallest size")

FASTER = Cause(
    "none",
    "each rank is faster than at the smallest size, which something else slowed down: a busy "
    "machine, or data that were not cached yet",
)

_BUCKETS = "other bucket sizes: --try bucket_cap_mb=1,25,100"
_VIEWS = "no copies into buckets: --try gradient_as_bucket_view=true"
_SELDOM = "all-reduce every n-th backward alone (no_sync): --try accumulation=4"
_HALF = "half the bytes: --try comm_hook=bf16_compress"
_WORKERS = "loader workers: --try num_workers=2,4,8, and persistent_workers=True"
_LARGER = "more samples a rank: --try batch_size=..., or accumulation with no_sync"


def cause(
    base: Measured, this: Measured, efficiency: float, findings: Sequence[Finding] = ()
) -> Cause:
    """Return the cause of most of the loss at a size, compared with the smallest one."""
    if efficiency >= MIN_GOOD:
        return NONE if efficiency < MAX_CREDIBLE else FASTER
    share = this.samples / base.samples if this.samples and base.samples else 1.0
    lost = (1.0 - efficiency) * this.step
    straggler = next((each for each in findings if each.code in STRAGGLERS), None)
    if straggler is not None:
        return Cause(
            "straggler",
            f"a straggler: {straggler.message}",
            (straggler.fix or "ddpdoctor report shows the line",),
        )
    grown = {
        "data": this.data - base.data * share,
        "compute": this.compute - base.compute * share,
        "communication": (this.exposed or 0.0) - (base.exposed or 0.0),
        "other": this.other - base.other * share,
    }
    if this.cpu and _lacks_cores(base, this, share, lost):
        return _cores(base, this, share, lost)
    most = max(grown, key=grown.__getitem__)
    if most == "communication":
        return _communication(this)
    if most == "compute":
        return _compute(base, this, share)
    if most == "data":
        return Cause(
            "data",
            f"data loading: a rank waits {_of(this.data, this)} for its batch, and "
            f"{formatting.time(base.data)} at the smallest size",
            (_WORKERS, "cheaper samples, or a faster disk that all ranks share"),
        )
    return Cause(
        "other",
        f"code between the phases: {_of(this.other, this)}, and {formatting.time(base.other)} "
        "at the smallest size",
        ("look for collectives, .item() and files in the loop: ddpdoctor report shows the lines",),
    )


def _lacks_cores(base: Measured, this: Measured, share: float, lost: float) -> bool:
    """Return whether ranks share cores, so each is slower and all wait for each other."""
    waited = (this.core_wait or 0.0) - (base.core_wait or 0.0) * share
    grown = this.compute - base.compute * share
    slower = this.compute > MIN_SLOWDOWN * base.compute * share and share >= 1.0
    return waited >= MIN_SHARE * lost or (slower and grown >= MIN_SHARE * lost)


def _cores(base: Measured, this: Measured, share: float, lost: float) -> Cause:
    cores = _cores_here()
    if this.core_wait is not None and this.core_wait >= MIN_SHARE * lost:
        how = f"a rank waits {_of(this.core_wait, this)} for one"
    else:
        how = f"a rank computes {this.compute / (base.compute * share):.1f} times as long as one"
        how += " alone" if base.ranks == 1 else f" of {base.ranks}"
    ranks, has = formatting.count(this.local, "rank"), formatting.count(cores, "core")
    if this.local <= cores:
        return Cause(
            "cores",
            f"oversubscribed cores: {how}, although {ranks} have {has}: other programs, their own "
            "threads and workers, or the memory that they share hold them up",
            (
                "fewer threads and workers a rank (OMP_NUM_THREADS, num_workers), or a machine "
                "that is idle",
            ),
        )
    return Cause(
        "cores",
        f"oversubscribed cores: {how}, as {ranks} share {has}",
        ("fewer ranks, fewer threads a rank (OMP_NUM_THREADS), or more cores for the job",),
    )


def _cores_here() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _communication(this: Measured) -> Cause:
    exposed = this.exposed or 0.0
    size = ""
    if this.gradient_bytes:
        size = f" ({formatting.size(this.gradient_bytes)}B of gradients"
        if this.bucket_bytes:
            size += f", in buckets of {formatting.size(this.bucket_bytes)}B"
        size += ")"
    words = f"communication that nothing overlaps: {_of(exposed, this)}{size}"
    if exposed > this.forward + this.backward:
        return Cause(
            "batch",
            f"too small a batch: forward and backward take "
            f"{formatting.time(this.forward + this.backward)}, and cannot hide {words}",
            (_LARGER, _SELDOM, _HALF, _BUCKETS),
        )
    return Cause("communication", words, (_BUCKETS, _VIEWS, _SELDOM, _HALF))


def _compute(base: Measured, this: Measured, share: float) -> Cause:
    longer = this.compute / (base.compute * share) if base.compute else 1.0
    if share < 1.0:
        return Cause(
            "batch",
            f"too small a batch: {this.samples:g} samples a rank take {longer:.1f} times their "
            f"part of what {base.samples:g} take",
            (_LARGER,),
        )
    if this.exposed is None:
        return Cause(
            "communication",
            f"communication within the backward pass, which takes {_of(this.backward, this)}, "
            f"and {formatting.time(base.backward)} at the smallest size "
            "(more steps tell how much of it)",
            (_BUCKETS, _VIEWS, _SELDOM, _HALF),
        )
    return Cause(
        "compute",
        f"the computation itself takes {longer:.2f} times as long beside other ranks",
        ("look for devices that are throttled or shared: ddpdoctor check, ddpdoctor top",),
    )


def _of(seconds: float, this: Measured) -> str:
    """Return a part of a step, as in ``62.1 ms of 433 ms``."""
    return f"{formatting.time(seconds)} of {formatting.time(this.step)}"


# -- published figures

REFERENCE_SETTING = "ResNet-50, batch 128 a GPU, 3x224x224, V100-PCIE-32G, torch 0.4.1"


class ReferenceFigure(NamedTuple):
    """One published measurement, in milliseconds."""

    gpus: int
    ddp: str
    total: int  # As published: forward and backward, each rounded
    forward: int
    backward: int  # Including communication


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
    """Return the figures as a table, next to measurements of the same sizes, if any."""
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

MAX_NOISE = 0.15  # Maximum difference of the slowest repeat from the fastest one
_BAR = 40  # Width of the longest bar in columns

_HEAD = ("ranks", "step", "data", "forward", "backward", "optim", "other", "exposed")
_WIDTHS = (5, 6, 6, 8, 9, 7, 7, 8)
_RATE, _EFFICIENCY = 10, 13


def table_lines(rows: Sequence[Row], *, ascii_only: bool) -> Iterator[str]:
    """Yield all lines except the heading: table, causes of losses, suggestions, bars.

    The rows of the job as it is come first.
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
    """Return the row that others are compared with."""
    return next((row for row in rows if row.is_base), None)


def row_cause(row: Row, rows: Sequence[Row]) -> Cause | None:
    """Return why a row is less efficient than the smallest size. None if unknown."""
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
    """Yield the difference between repeats of the unchanged job, if it exceeds noise."""
    worst, where = 0.0, None
    for row in rows:
        steps = [each.measured.step for each in row.outcomes if each.measured is not None]
        if row.variant == AS_IT_IS and len(steps) > 1 and max(steps) / min(steps) - 1 > worst:
            worst, where = max(steps) / min(steps) - 1, row
    if where is not None and worst >= MAX_NOISE:
        yield from _wrapped(
            f"the repeats with {where.size.words} differ by up to {100 * worst:.0f}%: the machine "
            "is busy with something else, so small differences mean nothing"
        )


def _finding_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield findings of the unchanged job, except stragglers, which have their own sentence."""
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
    """Draw the throughput of the unchanged job. Full bars are 100% efficiency."""
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
    cause, try, runs``. Times are seconds. Unknown values are null. ``published`` adds the published
    figures.
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
