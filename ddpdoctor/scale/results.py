"""The sizes to run, and the measurements at each.

Times are seconds. A rank's times are means over the middle half of its steps, ordered by length.
They are as robust as medians on a busy machine, and the parts of an iteration still add up to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding
from ddpdoctor.core.formatting import count
from ddpdoctor.core.options import Given, Passed
from ddpdoctor.run.overrides import DDP, KNOWN
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.step_series import split_steps

# -- plan the runs of ``ddpdoctor scale``: sizes, variants, repeats and command lines


class Size(NamedTuple):
    """A number of ranks on each of some nodes."""

    nodes: int
    local: int  # Ranks on each node

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.local

    @property
    def words(self) -> str:
        """The size in words: ``4 ranks on 2 nodes``."""
        on = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{count(self.ranks, 'rank')}{on}"

    @property
    def short(self) -> str:
        """The size in a column: ``4``, or ``2x8`` for two nodes with eight ranks each."""
        return f"{self.nodes}x{self.local}" if self.nodes > 1 else str(self.local)

    @property
    def order(self) -> tuple[int, int]:
        """The key to sort by: ranks, then nodes."""
        return self.ranks, self.nodes


@dataclass(frozen=True)
class Variant:
    """The job as it is, or with overridden arguments of torch."""

    name: str = ""  # ``bucket_cap_mb=25``. Empty for the job as it is.
    overrides: dict[str, str] = field(default_factory=dict)

    @property
    def communicates(self) -> bool:
        """Whether it changes only communication, which one rank does not have."""
        return all(KNOWN[name].owner == DDP for name in self.overrides)


AS_IT_IS = Variant()


class Planned(NamedTuple):
    """One run."""

    number: int  # From 1, in order. It is the same on every node.
    size: Size
    variant: Variant
    repeat: int  # From 1

    @property
    def words(self) -> str:
        """The run in words: ``2 ranks, bucket_cap_mb=25``."""
        return f"{self.size.words}, {self.variant.name}" if self.variant.name else self.size.words

    @property
    def directory(self) -> str:
        """The name of the run directory."""
        variant = f"-{self.variant.name}" if self.variant.name else ""
        return f"{self.number:03d}-ranks-{self.size.short}{variant}"


def sizes(nodes: Sequence[int], local: Sequence[int]) -> list[Size]:
    """Return all sizes, the smallest first."""
    return sorted((Size(n, each) for n in nodes for each in local), key=lambda size: size.order)


def variants(
    tried: Sequence[tuple[str, tuple[str, ...]]], compared: Sequence[str]
) -> list[Variant]:
    """Return the job as it is, and a variant for each value to try.

    ``compared`` are implementations of DDP, of which ``torch`` is the job as it is.
    """
    found = [AS_IT_IS]
    found += [Variant(name, {"ddp": name}) for name in compared if name != "torch"]
    for name, values in tried:
        found += [Variant(f"{name}={value}", {name: value}) for value in values]
    return found


def planned_runs(
    sizes: Sequence[Size], variants: Sequence[Variant], repeats: int
) -> Iterator[Planned]:
    """Yield the runs in order: each repeat goes once through all sizes, the smallest first.

    So changes on the machine affect every size alike.
    """
    number = 0
    for repeat in range(1, repeats + 1):
        for size in sizes:
            for variant in variants:
                compares = "ddp" in variant.overrides
                if variant.overrides and variant.communicates and size.ranks == 1 and not compares:
                    continue
                number += 1
                yield Planned(number, size, variant, repeat)


DEFAULT_PORT = 29500

MEETING_TIMEOUT = 3600
"""Seconds that a node waits for others, which may still be in a run of fewer nodes."""

_SIZE_OPTIONS = ("--nproc-per-node", "--nnodes")
_RENDEZVOUS_OPTIONS = (
    "--node-rank", "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--master-addr",
    "--master-port", "--standalone",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """The command line of the job for any size.

    Attributes:
        typed: Options of ``ddpdoctor run`` and torchrun for every run.
        rest: The script and its arguments.
        alone: Whether a run on one node chooses a free port.
        node: The rank of this node.
        host: The host of node 0.
        port: The port of the first run. Each run has its own, since a node may still be in the run
            before.
    """

    typed: tuple[str, ...]
    rest: tuple[str, ...]
    alone: bool = True
    node: int = 0
    host: str = ""
    port: int = 0

    def takes_part(self, planned: Planned) -> bool:
        """Return whether a run needs this node."""
        return self.node < planned.size.nodes

    def words(self, planned: Planned) -> list[str]:
        """Return the arguments of ``ddpdoctor run`` for a run."""
        local = ["--nproc-per-node", str(planned.size.local)]
        rendezvous = ["--standalone"] if self.alone else []
        if planned.size.nodes > 1:
            rendezvous = [
                *("--nnodes", str(planned.size.nodes), "--node-rank", str(self.node)),
                *("--master-addr", self.host, "--master-port", str(self.port + planned.number - 1)),
            ]
        return [*self.typed, *rendezvous, *local, "--", *self.rest]


def launch_from(given: Given, nodes: Sequence[int]) -> Launch:
    """Parse the command line for runs on these numbers of nodes.

    Raises:
        DoctorError: An option is missing, or cannot be used with scale.
    """
    values = {_spelled_option(each): each.value or "" for each in given.passed}
    for name in _SIZE_OPTIONS:
        if name in values:
            raise DoctorError(f"{name} is what scale varies", "name the sizes: --nproc 1,2,4")
    if max(nodes) == 1:
        alone = not any(name in values for name in _RENDEZVOUS_OPTIONS)
        return Launch(_option_words(given.passed), tuple(given.rest), alone=alone)
    typed = _option_words(
        [each for each in given.passed if _spelled_option(each) not in _RENDEZVOUS_OPTIONS]
    )
    if "--rdzv-conf" not in values:
        typed += ("--rdzv-conf", f"timeout={MEETING_TIMEOUT}")
    node, host, port = _rendezvous(values)
    if node >= max(nodes):
        raise DoctorError(
            f"--node-rank {node} is not one of the {max(nodes)} nodes, which count from 0"
        )
    return Launch(typed, tuple(given.rest), node=node, host=host, port=port)


def _option_words(options: Sequence[Passed]) -> tuple[str, ...]:
    return tuple(word for each in options for word in each.words)


def _rendezvous(values: Mapping[str, str]) -> tuple[int, str, int]:
    """Return the rank of this node, and the host and port of the rendezvous."""
    parts = (values.get("--master-addr"), values.get("--master-port"))
    endpoint = values.get("--rdzv-endpoint") or ":".join(part for part in parts if part)
    host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
    node = values.get("--node-rank", "")
    if not host or not node.isdigit() or not (port or "0").isdigit():
        raise DoctorError(
            "several nodes need --node-rank and --rdzv-endpoint",
            "start it on each: --nnodes 1,2 --node-rank R --rdzv-endpoint node0:29500",
        )
    return int(node), host, int(port or DEFAULT_PORT)


def _spelled_option(option: Passed) -> str:
    return option.name.replace("_", "-")


# -- results


MIN_TIMED = 3  # Minimum steps timed by DDP to estimate the communication in a backward
MIN_WAIT = 0.05  # Minimum share of a step spent waiting for a slower rank. Less may be noise.

_BYTES_OF_DTYPE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_NANOSECOND = 1e-9


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A typical step, as a mean over the ranks of this node."""

    ranks: int  # Ranks of all nodes
    local: int  # Ranks of this node
    steps: int  # Steps of each rank after the warm-up
    step: float
    data: float
    forward: float
    backward: float  # Only compute if ``exposed`` is known, else including communication
    optimizer: float
    other: float
    exposed: float | None
    """Communication not hidden by computation, including waits for slower ranks. None if unknown.
    """
    core_wait: float | None = None
    """Time in which the training thread was ready to run and had no core."""
    samples: float | None = None  # Of one rank
    backwards: float = 1.0
    cpu: bool = True  # The model is on CPUs
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
    """Measure the ranks of a run after the first ``warmup`` steps. None without more steps."""
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
    """Return the steps of each rank that DDP timed.

    None if there are too few. These are some of the short steps: they give the share of
    communication, not its length.
    """
    timed = [_usable_steps(run, rank.split_steps, warmup) for rank in ranks]
    built = all(rank.records.first(DdpRecord) for rank in ranks)
    return timed if built and min(map(len, timed)) >= MIN_TIMED else None


def _typical_seconds(every: Sequence[Sequence[StepRecord]], part: str) -> float:
    """Return a part of a typical step, as the mean over the ranks in seconds."""
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
    every: Sequence[Sequence[StepRecord]], of: Callable[[StepRecord], int | None], unit: float = 1.0
) -> float | None:
    """Return a value of a typical step, as the mean over the ranks. None if a rank has none."""
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
    """Return the repeat with the median iteration time, the faster of two medians."""
    return sorted(repeats, key=lambda each: each.step)[(len(repeats) - 1) // 2]


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    planned: Planned
    directory: Path  # Its run directory
    log: Path  # The output of the job
    status: int  # The exit status of ``ddpdoctor run``
    measured: Measured | None
    failure: str = ""  # Why nothing was measured, in a clause
    findings: tuple[Finding, ...] = ()
    overrides: dict[str, str] = field(default_factory=dict)
    """Arguments of torch overridden by the variant and for weak or strong scaling."""


@dataclass(frozen=True)
class Row:
    """All repeats of a size and a variant."""

    size: Size
    variant: Variant
    outcomes: tuple[Outcome, ...]
    efficiencies: tuple[float, ...] = ()
    """Throughput per rank of each repeat, relative to the smallest size in the same repeat."""
    is_base: bool = False  # The others are compared with it

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
    """Return the throughput per rank relative to the base. None if they are not comparable."""
    if base is None or (measured.samples is None) != (base.samples is None):
        return None
    return (measured.rate / measured.ranks) / (base.rate / base.ranks)
