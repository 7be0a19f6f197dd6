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
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.waits import split_steps

FEWEST_SPLIT = 3
"""Steps with DDP's own timers that it takes to say how much of a backward was communication."""

WAITED = 0.05
"""Share of a step that ranks wait for a slower one, below which it may be noise."""

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
    """Communication that no computation hid, waits for slower ranks included; None if not known."""
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
    split = split_steps(run)
    counted = [
        (rank, steps) for rank in run.last if (steps := _usable(run, split[rank.rank], warmup))
    ]
    if not counted:
        return None
    ranks, every = [rank for rank, _ in counted], [steps for _, steps in counted]
    timed = _timed_by_ddp(run, ranks, warmup)
    backward, wait = _typical(every, "backward"), _typical(every, "wait")
    if timed is not None:
        computed, exposed = _typical(timed, "backward"), _typical(timed, "wait")
        both = backward + wait
        wait = both * exposed / (computed + exposed) if exposed else 0.0
        backward = both - wait
    first = next((built for rank in ranks if (built := rank.records.first(DdpRecord))), None)
    step = _typical(every, "total")
    # Without DDP's timers the ranks' backwards show at least how long they wait for a slower rank.
    shown = timed is not None or (first is not None and wait >= WAITED * step)
    on_cpu = first is None or first.device == "cpu"
    return Measured(
        ranks=max(run.world_size, len(run.last)),
        local=len(ranks),
        steps=min(map(len, every)),
        step=step,
        data=_typical(every, "data"),
        forward=_typical(every, "forward"),
        backward=backward,
        optimizer=_typical(every, "optimizer"),
        other=_typical(every, "other") + (0.0 if shown else wait),
        exposed=wait if shown else None,
        core_wait=_mean_known(every, lambda step: step.waited, _NANO) if on_cpu else None,
        samples=_mean_known(every, lambda step: step.samples),
        backwards=mean(median(step.backwards for step in steps) for steps in every),
        cpu=on_cpu,
        gradient_bytes=_gradient_bytes(first),
        bucket_bytes=first.bucket_cap_bytes if first is not None else None,
    )


def _timed_by_ddp(run: Run, ranks: Sequence[Rank], warmup: int) -> list[list[StepRecord]] | None:
    """The steps of each rank that DDP's own timers are known of; None if there are too few.

    Of short steps they are some, so they give the share of communication and not its length.
    """
    timed = [_usable(run, rank.split_steps, warmup) for rank in ranks]
    built = all(rank.records.first(DdpRecord) for rank in ranks)
    return timed if built and min(map(len, timed)) >= FEWEST_SPLIT else None


def _typical(every: Sequence[Sequence[StepRecord]], part: str) -> float:
    """The mean over the ranks of a part of a typical step, in seconds."""
    typical = [float(mean(getattr(step, part) for step in _middle(steps))) for steps in every]
    return mean(typical) * _NANO


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
