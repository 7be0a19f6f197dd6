"""Measure each run from the step records of its ranks, and group the runs of a size into a row.

Times are seconds. A rank's times are means over the middle half of its steps, ordered by length.
They are as robust as medians on a busy machine, and the parts of an iteration still add up to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from ddpdoctor.core.finding import Finding
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.step_series import split_steps
from ddpdoctor.scale.plan import AS_IT_IS, Planned, Size, Variant

MIN_TIMED = 3
"""Steps timed by DDP that are needed to tell how much of a backward was communication."""

MIN_WAIT = 0.05
"""Share of a step that ranks wait for a slower one. Less may be noise."""

_BYTES_OF_DTYPE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_NANOSECOND = 1e-9


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A typical step, as a mean over the ranks of this node."""

    ranks: int
    """Ranks of all nodes."""
    local: int
    """Ranks of this node."""
    steps: int
    """Steps of each rank that count, after the warm-up."""
    step: float
    data: float
    forward: float
    backward: float
    """Compute alone if ``exposed`` is known, else with its communication."""
    optimizer: float
    other: float
    exposed: float | None
    """Communication that no computation hid, with waits for slower ranks. None if unknown."""
    core_wait: float | None = None
    """For how long the training thread was ready to run and had no core."""
    samples: float | None = None
    """Of one rank."""
    backwards: float = 1.0
    cpu: bool = True
    """The model is on CPUs."""
    gradient_bytes: int = 0
    bucket_bytes: int | None = None

    @property
    def compute(self) -> float:
        """Forward, backward and optimizer."""
        return self.forward + self.backward + self.optimizer

    @property
    def rate(self) -> float:
        """Samples of all ranks per second. If unknown, iterations times ranks."""
        return self.ranks * (self.samples or 1.0) / self.step


def measure(run: Run, warmup: int) -> Measured | None:
    """Measure the ranks of a run after the first ``warmup`` steps; None without more steps."""
    split = split_steps(run)
    counted = [
        (rank, steps)
        for rank in run.last
        if (steps := _usable_steps(run, split[rank.rank], warmup))
    ]
    if not counted:
        return None
    ranks, every = [rank for rank, _ in counted], [steps for _, steps in counted]
    timed = _timed_by_ddp(run, ranks, warmup)
    backward, wait = _typical_seconds(every, "backward"), _typical_seconds(every, "wait")
    if timed is not None:
        computed, exposed = _typical_seconds(timed, "backward"), _typical_seconds(timed, "wait")
        both = backward + wait
        wait = both * exposed / (computed + exposed) if exposed else 0.0
        backward = both - wait
    first = next((built for rank in ranks if (built := rank.records.first(DdpRecord))), None)
    step = _typical_seconds(every, "total")
    # Without DDP's timers the ranks' backwards show at least how long they wait for a slower rank.
    shown = timed is not None or (first is not None and wait >= MIN_WAIT * step)
    on_cpu = first is None or first.device == "cpu"
    return Measured(
        ranks=max(run.world_size, len(run.last)),
        local=sum(not rank.elsewhere for rank in ranks),
        steps=min(map(len, every)),
        step=step,
        data=_typical_seconds(every, "data"),
        forward=_typical_seconds(every, "forward"),
        backward=backward,
        optimizer=_typical_seconds(every, "optimizer"),
        other=_typical_seconds(every, "other") + (0.0 if shown else wait),
        exposed=wait if shown else None,
        core_wait=_mean_known(every, lambda step: step.waited, _NANOSECOND) if on_cpu else None,
        samples=_mean_known(every, lambda step: step.samples),
        backwards=mean(median(step.backwards for step in steps) for steps in every),
        cpu=on_cpu,
        gradient_bytes=_gradient_bytes(first),
        bucket_bytes=first.bucket_cap_bytes if first is not None else None,
    )


def _timed_by_ddp(run: Run, ranks: Sequence[Rank], warmup: int) -> list[list[StepRecord]] | None:
    """Return the steps of each rank that DDP timed; None if there are too few.

    Those are some of the short steps: they give the share of communication, not its length.
    """
    timed = [_usable_steps(run, rank.split_steps, warmup) for rank in ranks]
    built = all(rank.records.first(DdpRecord) for rank in ranks)
    return timed if built and min(map(len, timed)) >= MIN_TIMED else None


def _typical_seconds(every: Sequence[Sequence[StepRecord]], part: str) -> float:
    """Return the mean over the ranks of a part of a typical step, in seconds."""
    typical = [float(mean(getattr(step, part) for step in _middle_half(steps))) for steps in every]
    return mean(typical) * _NANOSECOND


def _usable_steps(run: Run, steps: Iterable[StepRecord], warmup: int) -> list[StepRecord]:
    return [
        step
        for step in steps
        if step.step >= warmup and step.total > 0 and not step.skipped and run.undisturbed(step)
    ]


def _middle_half(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the steps without the shortest and the longest quarter."""
    quarter = len(steps) // 4
    return sorted(steps, key=lambda step: step.total)[quarter : len(steps) - quarter]


def _mean_known(
    every: Sequence[Sequence[StepRecord]],
    of: Callable[[StepRecord], int | None],
    unit: float = 1.0,
) -> float | None:
    """Return the mean over the ranks of a value of a typical step; None if a rank has none."""
    typical = []
    for steps in every:
        known = [value for step in _middle_half(steps) if (value := of(step)) is not None]
        if not known:
            return None
        typical.append(mean(known))
    return mean(typical) * unit


def _gradient_bytes(ddp: DdpRecord | None) -> int:
    parameters = ddp.parameters if ddp is not None else ()
    sizes = (math.prod(each.shape) * _BYTES_OF_DTYPE.get(each.dtype, 4) for each in parameters)
    return sum(sizes)


def median_repeat(repeats: Sequence[Measured]) -> Measured:
    """Return the repeat with the median iteration, of an even number the faster of the two."""
    return sorted(repeats, key=lambda each: each.step)[(len(repeats) - 1) // 2]


@dataclass(frozen=True)
class Outcome:
    """One run that is over."""

    planned: Planned
    directory: Path
    """Its run directory."""
    log: Path
    """The output of the job."""
    status: int
    """The exit status of ``ddpdoctor run``."""
    measured: Measured | None
    failure: str = ""
    """Why nothing was measured, in a clause."""
    findings: tuple[Finding, ...] = ()
    overrides: dict[str, str] = field(default_factory=dict)
    """Overridden arguments of torch, by its variant and for weak or strong scaling."""


@dataclass(frozen=True)
class Row:
    """All repeats of a size and a variant."""

    size: Size
    variant: Variant
    outcomes: tuple[Outcome, ...]
    efficiencies: tuple[float, ...] = ()
    """Throughput per rank of each repeat, relative to the smallest size in the same repeat."""
    is_base: bool = False
    """The others are compared with it."""

    @property
    def measured(self) -> Measured | None:
        """The median repeat."""
        known = [each.measured for each in self.outcomes if each.measured is not None]
        return median_repeat(known) if known else None

    @property
    def failure(self) -> Outcome | None:
        """A run that failed."""
        return next((each for each in self.outcomes if each.failure), None)

    @property
    def efficiency(self) -> float | None:
        """The median over the repeats. None if unknown."""
        return median(self.efficiencies) if self.efficiencies else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest of several repeats."""
        if len(self.efficiencies) < 2:
            return None
        return min(self.efficiencies), max(self.efficiencies)


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each size and variant: first the job as it is, each sorted by size."""
    grouped: dict[tuple[str, Size], list[Outcome]] = {}
    for each in outcomes:
        key = (each.planned.variant.name, each.planned.size)
        grouped.setdefault(key, []).append(each)
    measured = [each for each in outcomes if each.measured is not None]
    smallest = min(
        (each.planned.size for each in measured if each.planned.variant == AS_IT_IS),
        key=lambda size: size.order,
        default=None,
    )
    bases = {
        each.planned.repeat: each.measured
        for each in measured
        if each.planned.size == smallest and each.planned.variant == AS_IT_IS and each.measured
    }
    base = median_repeat(list(bases.values())) if bases else None
    order = list(dict.fromkeys(each.planned.variant.name for each in outcomes))
    found = []
    for (name, size), group in grouped.items():
        efficiencies = tuple(
            efficiency(each.measured, bases.get(each.planned.repeat, base))
            for each in group
            if each.measured is not None and base is not None
        )
        known = tuple(value for value in efficiencies if value is not None)
        is_base = size == smallest and not name
        found.append(Row(size, group[0].planned.variant, tuple(group), known, is_base))
    return sorted(found, key=lambda row: (order.index(row.variant.name), row.size.order))


def efficiency(measured: Measured, base: Measured | None) -> float | None:
    """Return the throughput per rank relative to the base; None if the two do not compare."""
    if base is None or (measured.samples is None) != (base.samples is None):
        return None
    return (measured.rate / measured.ranks) / (base.rate / base.ranks)
