"""What a run took, by the step records that its ranks wrote. Times are seconds.

A rank's times are means over the middle half of its steps, ordered by their length: as robust as
medians against a busy machine, and the parts of an iteration still add up to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Run

FEWEST_SPLIT = 3
"""Steps with DDP's own timers that it takes to say how much of a backward was communication."""

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_NANO = 1e-9


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An iteration: that of a typical step, as a mean over the ranks of this node."""

    ranks: int
    """Of all nodes."""
    local: int
    """Those of this node."""
    steps: int
    """How many of each rank were counted, after the warm-up."""
    step: float
    data: float
    forward: float
    backward: float
    """Compute alone where ``exposed`` is known, else with its communication."""
    optimizer: float
    other: float
    exposed: float | None
    """Communication that no computation hid; None where DDP's timers do not tell."""
    core_wait: float | None = None
    """Part of the iteration in which the training thread was ready to run and had no core."""
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
        """Samples of all ranks in a second; where they are not known, iterations times ranks."""
        return self.ranks * (self.samples or 1.0) / self.step


def measure(run: Run, warmup: int) -> Measured | None:
    """What the ranks of a run took, without the first ``warmup`` steps; None without others."""
    ranks = [(rank, steps) for rank in run.last if (steps := _usable(run, rank.steps, warmup))]
    if not ranks:
        return None
    built = [rank.records.first(DdpRecord) for rank, _ in ranks]
    timed = [_usable(run, rank.split_steps, warmup) for rank, _ in ranks]
    split = all(built) and all(len(steps) >= FEWEST_SPLIT for steps in timed)
    parts = timed if split else [steps for _, steps in ranks]

    def of(name: str) -> float:
        typical = [float(mean(getattr(step, name) for step in _middle(each))) for each in parts]
        return mean(typical) * _NANO

    exposed = of("wait")
    first = next((each for each in built if each is not None), None)
    every = [steps for _, steps in ranks]
    on_cpu = first is None or first.device == "cpu"
    return Measured(
        ranks=max(run.world_size, len(run.last)),
        local=len(ranks),
        steps=min(map(len, every)),
        step=mean(mean(step.total for step in _middle(steps)) for steps in every) * _NANO,
        data=of("data"),
        forward=of("forward"),
        backward=of("backward"),
        optimizer=of("optimizer"),
        other=of("other") + (0.0 if split else exposed),
        exposed=exposed if split else None,
        core_wait=_mean_known(every, lambda step: step.waited, _NANO) if on_cpu else None,
        samples=_mean_known(every, lambda step: step.samples),
        backwards=mean(median(step.backwards for step in steps) for steps in every),
        cpu=on_cpu,
        gradient_bytes=_gradient_bytes(first),
        bucket_bytes=first.bucket_cap_bytes if first is not None else None,
    )


def _usable(run: Run, steps: Iterable[StepRecord], warmup: int) -> list[StepRecord]:
    return [
        step
        for step in steps
        if step.step >= warmup and step.total > 0 and not step.skipped and run.undisturbed(step)
    ]


def _middle(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The steps of neither the shortest nor the longest quarter."""
    quarter = len(steps) // 4
    return sorted(steps, key=lambda step: step.total)[quarter : len(steps) - quarter]


def _mean_known(
    every: Sequence[Sequence[StepRecord]],
    of: Callable[[StepRecord], int | None],
    unit: float = 1.0,
) -> float | None:
    """The mean over the ranks of what a typical step has; None if a rank's is not known."""
    typical = []
    for steps in every:
        known = [value for step in _middle(steps) if (value := of(step)) is not None]
        if not known:
            return None
        typical.append(mean(known))
    return mean(typical) * unit


def _gradient_bytes(built: DdpRecord | None) -> int:
    if built is None:
        return 0
    return sum(math.prod(each.shape) * _BYTES.get(each.dtype, 4) for each in built.parameters)


def middle(repeats: Sequence[Measured]) -> Measured:
    """The repeat whose iteration is the median one; of an even number the faster of the two."""
    return sorted(repeats, key=lambda each: each.step)[(len(repeats) - 1) // 2]
