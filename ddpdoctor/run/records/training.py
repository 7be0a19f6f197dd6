"""Records of the training loop: steps, lines, profiles. Times are nanoseconds."""

from __future__ import annotations

from typing import NamedTuple

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import CodeFrame, PlacedRecord, Record
from ddpdoctor.run.records.declaring import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(Record):
    """A step and where its time went, or where that of several short ones went on average.

    ``data``, ``forward``, ``backward``, ``optimizer``, ``other`` and ``wait`` add up to ``total``.
    """

    kind = "step"
    kept = 0

    step: int = -1
    """Its number, of several that of the last; a line without one is no step."""
    steps: int = 1
    """How many steps the line stands for. Loss and batch are those of some of them."""
    each: tuple[int, ...] = ()
    """The backwards of each, if they differ: a number, in how many steps, the next number, ..."""
    epoch: int | None = None
    start: int = 0
    """Unix nanoseconds."""
    data: int = 0
    forward: int = 0
    backward: int = 0
    optimizer: int = 0
    other: int = 0
    wait: int = 0
    total: int = 0
    split: bool = False
    """``backward`` is compute alone, since DDP's own timers tell how long its all-reduce was
    exposed; without it ``backward`` holds that wait, too."""
    cpu: int | None = None
    """For how long the training thread ran; None if the kernel does not tell."""
    waited: int | None = None
    """For how long it was ready to run and had no CPU core."""
    samples: int | None = None
    loss: float | None = None
    norm: float | None = None
    """Norm of all gradients, as ``clip_grad_norm_`` returned it; None where none was called."""
    backwards: int = 1
    skipped: bool = False
    """A GradScaler, or the job, did not step the optimizer."""
    outside: int = 0

    @property
    def own(self) -> int:
        """What this rank spent itself: all of the step but the wait for others."""
        return self.total - self.wait


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRecord(PlacedRecord):
    """A line of the user's code that enters a phase; written once for each."""

    kind = "site"

    phase: str


class SampledStack(NamedTuple):
    """A stack of the training thread; in JSON a list."""

    times: int
    """How often it was seen."""
    frames: tuple[CodeFrame, ...]
    """Of the user's code, innermost first."""
    waits: tuple[str, str]
    """File name and function of the innermost frame of all."""
    letter: str
    """The state of the thread: R runs or wants to, S sleeps, D waits for a disk or device."""
    phase: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord(Record):
    """Where the time of a rank went, by samples of its stack; 3 of a rank.

    What follows ``samples`` was counted while they were taken, and is 0 where it cannot be read.
    """

    kind = "profile"

    time: int
    asked: int
    """Which request it answers."""
    step: int = 0
    samples: int = 0
    wall: int = 0
    steps: int = 0
    ran: int = 0
    """For how long the training thread ran, and then: was ready to run and had no core."""
    waited: int = 0
    minor: int = 0
    """Page faults without a read, and then: with one."""
    major: int = 0
    system: int = 0
    """For how long the thread was in the kernel."""
    characters: int = 0
    """Bytes read and written, and then: those of a disk."""
    disk: int = 0
    children: int = 0
    """Child processes, and then: how long they ran, and waited for a core."""
    children_ran: int = 0
    children_waited: int = 0
    gc: int = 0
    """For how long Python collected garbage."""
    collections: int = 0
    affinity: tuple[int, ...] = ()
    """The cores that the thread may run on."""
    threads: int = 0
    """Threads that torch computes with."""
    cost: int = 0
    """What the samples cost."""
    stacks: tuple[SampledStack, ...] = ()


class IdleBatch(NamedTuple):
    """A batch without a backward; in JSON a list."""

    batch: int
    step: int
    forward: bool
    """There was a forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRecord(Record):
    """A training loop began, or ended; of late ones only how they did."""

    kind = "loop"
    # Its begin without its end would be a loop that was never left.
    kept = 0

    time: int
    loop: int
    """Its number."""
    state: str
    """``trains``; ``ended``, ``left`` or ``failed`` once it is over."""
    step: int = 0
    frames: tuple[Location, ...] = ()
    """At its begin: the lines that led to the first batch, innermost first."""
    before: int | None = None
    """At its begin: reduced backwards that the rank had begun."""
    joins: bool = False
    """At its begin: it is within ``join()``."""
    fetched: int | None = None
    """At its end: batches that it took."""
    after: int = 0
    """At its end: reduced backwards that the rank has begun."""
    idle: tuple[IdleBatch, ...] = ()
    idled: int = 0
    """At its end: how many idle batches there were, of which ``idle`` has the first."""
    left_at: tuple[Location, ...] = ()
    """At its end: the lines at which it was left, innermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord(PlacedRecord):
    """A forward of DDP without gradients that broadcasts its buffers; 64 of a rank."""

    kind = "evaluation"

    time: int
    armed: int
    """Forward passes so far whose backward was to be all-reduced."""
    type: str
    """The class of the model."""
    group: tuple[int, ...]
    """The ranks that DDP was built for."""
    buffers: int
