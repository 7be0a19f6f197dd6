"""Records of the training loop: steps, profiles, data that was drawn, checkpoints."""

from __future__ import annotations

from typing import NamedTuple

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import CodeFrame, Part, PlacedRecord, Record
from ddpdoctor.run.records.declaring import dataclass

# -- records of the training loop: steps, lines, profiles. Times are nanoseconds


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


# -- records of what each rank drew of the data, and of checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerFacts(Part):
    """What a sampler's attributes say; None for those that it does not have."""

    name: str = ""
    """Its class."""
    torch: bool = False
    """It, and what it wraps, are torch's own."""
    rank: int | None = None
    num_replicas: int | None = None
    seed: int | None = None
    epoch: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    replacement: bool | None = None
    set_epoch: bool = False
    """It has the method."""
    id: int | None = None
    """Its number among the samplers of the rank."""
    made: Location | None = None
    """The line that built it."""


class Head(NamedTuple):
    """The draws at the beginning of a pass; in JSON a list."""

    draws: int
    digest: int
    """A hash of them in their order."""


class Sketch(NamedTuple):
    """Samples by their content; in JSON a list."""

    looked: int
    """How many were hashed."""
    repeats: int
    """How often one of those kept came again."""
    hashes: tuple[int, ...]
    """The smallest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord(PlacedRecord):
    """What a pass over a loader drew; 32 passes of a rank.

    ``path`` and ``line`` are where the loader is read. Each pass is written several times; the last
    record counts.
    """

    kind = "pass"

    time: int = 0
    pass_: int
    """Which pass of the rank it is."""
    number: int
    """Which pass over its loader it is, from 0."""
    state: str
    """``ended`` or ``left`` once it is over; ``unfollowed`` where the overhead budget ended the
    recording before: what came later is not known."""
    made: Location | None = None
    """The line that built the loader."""
    armed: int = 0
    """Forward passes before it whose backward was to be all-reduced."""
    workers: int = 0
    collates: bool = False
    """The loader fetches a batch at once."""
    dataset: str = ""
    """The class of the data set."""
    iterable: bool = False
    in_order: bool = True
    """The workers' batches come in turn."""
    sampler: SamplerFacts | None = None
    idle: tuple[Location, ...] = ()
    """Lines that built samplers of the same data set that no loader was given."""
    split: Location | None = None
    """The line that split the data set."""
    subset: int | None = None
    """A hash of the indices of a ``Subset``."""
    subset_length: int | None = None
    length: int | None = None
    """Indices of the space that all ranks share; None if it is not known."""
    batches: int | None = None
    """How many there will be; None if only the job's code could tell."""
    followed: int = 0
    """Indices of that space that all ranks follow."""
    fetched: int = 0
    """Batches that the training loop got."""
    marks: int = 0
    """Batches after which a backward pass came."""
    joins: bool = False
    """It is within ``join()``."""
    collectives: int | None = None
    """Collectives that the rank called meanwhile; reductions and gathers of them follow."""
    reductions: int | None = None
    gathers: int | None = None
    armed_after: int | None = None
    """``armed`` when it was over."""
    closed: int = 0
    """Unix nanoseconds at which it was over."""
    to_end: bool = False
    """The loop in the source has no way out before its end."""
    draws: int = 0
    order: int | None = None
    """A hash of the draws in their order."""
    falls: int = 0
    """Draws below the one before."""
    repeats: int = 0
    """Followed indices that were drawn again."""
    opaque: bool = False
    """Its indices are no whole numbers."""
    hits: tuple[int, ...] = ()
    """What it drew of the followed indices."""
    rows: tuple[tuple[int | None, ...], ...] = ()
    """Samples by their content: the index (None without one), then hashes of what it held."""
    head: Head | None = None
    sketch: Sketch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord(PlacedRecord):
    """A checkpoint was saved; 50 of a rank."""

    kind = "save"

    time: int
    file: str
    content: str
    """``module``, ``wrapper``, ``wrapped`` or ``data``."""
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoadRecord(PlacedRecord):
    """torch.load put tensors on a GPU; 50 of a rank."""

    kind = "gpu_load"

    time: int = 0
    device: str
    device_uuid: str
    mapped: bool
    """A ``map_location`` was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAppliedRecord(PlacedRecord):
    """Most of a checkpoint was passed over by strict=False."""

    kind = "not_applied"

    number: int = -1
    matched: int
    """Names that fit."""
    given: int
    """Names of the checkpoint."""
    wanted: int
    """Names of the model."""
    missing: tuple[str, ...]
    """The first names of the model that the checkpoint has not."""
    unexpected: tuple[str, ...]
    """The first names of the checkpoint that the model has not."""
    prefix: str = ""
    """What most names of one side begin with."""
    of: str = ""
    """Which side that is: ``checkpoint`` or ``model``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRecord(Record):
    """A load that was not applied was made up for."""

    kind = "applied"

    number: int
