"""Records of the training loop: steps, profiles, drawn data, checkpoints.

Durations are nanoseconds, times Unix nanoseconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import CodeFrame, Part, PlacedRecord, Record, dataclass

# -- Steps and profiles


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(Record, kind="step", kept=0):
    """A step and how its time was spent, or the averages of several short steps.

    ``data``, ``forward``, ``backward``, ``optimizer``, ``other`` and ``wait`` add up to ``total``.
    """

    step: int = -1  # Its number, or that of the last of several. -1 if the line is not a step.
    steps: int = 1  # Number of steps in the line. Loss and samples are those of some of them.
    each: tuple[int, ...] = ()
    """Run-length encoded backwards per step, if they differ: a number, its steps, a number, ..."""
    epoch: int | None = None
    start: int = 0  # Unix nanoseconds
    data: int = 0
    forward: int = 0
    backward: int = 0
    optimizer: int = 0
    other: int = 0
    wait: int = 0
    total: int = 0
    split: bool = False
    """Whether DDP's timers measured the exposed all-reduce. If not, ``backward`` includes that
    wait."""
    cpu: int | None = None
    """CPU time of the training thread. None if the kernel does not report it."""
    waited: int | None = None  # Time in which the thread was ready to run and had no CPU core
    host: int = 0  # Time of the host's own work if it certainly ran ahead of the GPU. Otherwise 0.
    samples: int | None = None
    loss: float | None = None
    norm: float | None = None
    """Norm of all gradients, as ``clip_grad_norm_`` returned it. None without a call."""
    backwards: int = 1
    skipped: bool = False  # A GradScaler or the job skipped the optimizer step
    outside: int = 0

    @property
    def own(self) -> int:
        """The time of this rank itself: the step without the wait for others."""
        return self.total - self.wait

    @property
    def settled(self) -> StepRecord:
        """The step without GPU waits that delayed nothing because the host was busy.

        The GPU of a rank whose steps begin earlier waits in each all-reduce. If all hosts work as
        long as the step takes, none would be faster without that wait.
        """
        hidden = self.wait - max(self.total - self.host, 0) if self.host else 0
        if hidden <= 0:
            return self
        return replace(self, wait=self.wait - hidden, other=self.other + hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRecord(Record, kind="trained", kept=16):
    """The data and settings of one step. Written on request (`ddpdoctor.run.names.TRAINED`)."""

    step: int
    rates: tuple[float, ...] = ()  # Learning rate of each parameter group, before the step
    decays: tuple[float, ...] = ()  # Their weight decay
    samples: int = 0  # In all forwards, by the first dimension of the module's first tensor
    forwards: int = 0
    loss: float | None = None
    """Mean over the backwards, before the job divided each loss by their number."""
    rows: int | None = None
    """Predictions with a gradient, of all forwards: samples, tokens or pixels that the loss
    counts. None if the module returned no tensor of them."""
    pull: float | None = None  # Sum of the absolute gradients of these predictions
    armed: int = 0  # Forwards so far whose backward is all-reduced
    position: int | None = None  # The scheduler's, before the step
    norm: float | None = None  # Norm of all gradients, as ``clip_grad_norm_`` returned it
    used: float | None = None  # The same as the optimizer got them
    average: float | None = None
    """Decay of averaged weights since the step before: 1 if they did not change. None without."""
    masks: tuple[int, int] | None = None
    """Hashes of the states of the random number generator before and after the first forward."""
    spread: float | None = None  # Norm of the running variances of BatchNorm layers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModelRecord(PlacedRecord, kind="trained_model"):
    """The model that a rank trains, at its first step. Written like `TrainedRecord`.

    ``path`` and ``line`` are those of a hook that clips the gradient of a parameter, if any.
    """

    weights: float  # Norm of all parameters
    batchnorm: int  # Number of BatchNorm layers
    synchronized: int  # How many of them are SyncBatchNorm
    hooks: int  # Number of parameters with such a hook


@dataclass(frozen=True, slots=True, kw_only=True)
class CourseRecord(PlacedRecord, kind="course"):
    """The schedule of the learning rate, where it could be computed. Written like `TrainedRecord`.

    Positions are those of the scheduler. None if a position was not found.
    """

    scheduler: str  # Its class
    start: int  # Its position then
    rate: float  # The highest of the first parameter group
    peak: int  # The first position with the highest rate
    half: int | None = None
    """The first after it with at most half of that rate, or where ReduceLROnPlateau may cut it."""
    end: int | None = None  # The first after it with the lowest rate


@dataclass(frozen=True, slots=True, kw_only=True)
class CapsuleRecord(PlacedRecord, kind="capsule", kept=8):
    """A step that was kept so that it can be recomputed, or the reason why it was not."""

    time: int
    step: int
    bytes: int = 0
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRecord(PlacedRecord, kind="site"):
    """A line of the user's code that enters a phase. Written once for each."""

    phase: str


class SampledStack(NamedTuple):
    """A stack of the training thread. In JSON a list."""

    times: int  # Number of samples with this stack
    frames: tuple[CodeFrame, ...]  # Frames of the user's code, innermost first
    waits: tuple[str, str]  # File name and function of the innermost frame, the user's or not
    letter: str
    """The state of the thread: R runs or wants to, S sleeps, D waits for a disk or device."""
    phase: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord(Record, kind="profile"):
    """How a rank spent its time, by samples of its stack. At most 3 per rank.

    The counters after ``samples`` cover the sampled period. They are 0 if they cannot be read.
    """

    time: int
    asked: int  # Number of the request that it answers
    step: int = 0
    samples: int = 0
    wall: int = 0
    steps: int = 0
    ran: int = 0
    """Time that the training thread ran. ``waited``: that it was ready to run and had no core."""
    waited: int = 0
    minor: int = 0  # Page faults without a read from disk. ``major``: with one.
    major: int = 0
    system: int = 0  # Time of the thread in the kernel
    characters: int = 0  # Bytes read and written. ``disk``: those of a disk.
    disk: int = 0
    children: int = 0  # Child processes. The next two: how long they ran, and waited for a core.
    children_ran: int = 0
    children_waited: int = 0
    gc: int = 0  # Time of Python's garbage collections
    affinity: tuple[int, ...] = ()  # The cores on which the thread may run
    threads: int = 0  # Number of torch's compute threads
    cost: int = 0  # Time that the samples took
    stacks: tuple[SampledStack, ...] = ()


class IdleBatch(NamedTuple):
    """A batch without a backward. In JSON a list."""

    batch: int
    step: int
    forward: bool  # The batch had a forward


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRecord(Record, kind="loop"):
    """A training loop began or ended."""

    # A start without an end would look like a loop that was never left.
    kept = 0

    time: int
    loop: int  # Its number
    state: str  # ``trains``, or ``ended``, ``left`` or ``failed`` once it is over
    step: int = 0
    frames: tuple[Location, ...] = ()
    """At its start: the call stack of the first batch, innermost first."""
    before: int | None = None  # At its start: number of reduced backwards that the rank has begun
    joins: bool = False  # At its start: whether it is within ``join()``
    fetched: int | None = None  # At its end: number of fetched batches
    after: int = 0  # At its end: number of reduced backwards that the rank has begun
    idle: tuple[IdleBatch, ...] = ()
    idled: int = 0  # At its end: number of idle batches, of which ``idle`` has the first
    left_at: tuple[Location, ...] = ()  # At its end: the lines that left it, innermost first


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord(PlacedRecord, kind="evaluation"):
    """A DDP forward without gradients that broadcasts buffers. At most 64 per rank."""

    time: int
    armed: int  # Forward passes so far whose backward is all-reduced
    type: str  # The class of the model
    group: tuple[int, ...]  # The ranks of DDP's process group
    buffers: int


# -- Drawn data and checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerFacts(Part):
    """Attributes of a sampler. None for those that it does not have."""

    name: str = ""  # Its class
    torch: bool = False  # It and the samplers that it wraps are torch's own
    rank: int | None = None
    num_replicas: int | None = None
    seed: int | None = None
    epoch: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    replacement: bool | None = None
    set_epoch: bool = False  # It has this method
    id: int | None = None  # Its number among the samplers of the rank
    made: Location | None = None  # The line that built it


class Head(NamedTuple):
    """The draws at the beginning of a pass. In JSON a list."""

    draws: int
    digest: int  # A hash of the draws in their order


class Sketch(NamedTuple):
    """A sketch of samples by their content. In JSON a list."""

    looked: int  # Number of hashed samples
    repeats: int  # Repetitions of the kept ones
    hashes: tuple[int, ...]  # The smallest hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class FedRecord(PlacedRecord, kind="fed", kept=1):
    """The samples of the first batches of a rank that trains without a loader, by its forward."""

    batches: tuple[tuple[int, ...], ...] = ()
    """A hash of each sample by its content, by forward of a DDP module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord(PlacedRecord, kind="pass"):
    """The indices drawn by a pass over a loader. At most 32 passes per rank.

    ``path`` and ``line`` are where the loader is read. Each pass is written several times. The last
    record counts.
    """

    time: int = 0
    pass_: int  # Number of the pass on the rank
    number: int  # Number of the pass over its loader, from 0
    state: str
    """``ended`` or ``left`` once it is over. ``unfollowed`` if the overhead budget ended the
    recording earlier."""
    made: Location | None = None  # The line that built the loader
    armed: int = 0  # Forward passes before it whose backward is all-reduced
    workers: int = 0
    dataset: str = ""  # The class of the data set
    iterable: bool = False
    in_order: bool = True  # The workers' batches come in order
    persistent: bool = False  # Its workers live longer than the pass
    data_epoch: int | None = None  # The epoch that an iterable data set has in the rank, if any
    shuffles: bool = False  # An iterable data set has a part that is named after shuffling
    sampler: SamplerFacts | None = None
    idle: tuple[Location, ...] = ()
    """Lines that built samplers of the same data set that no loader uses."""
    split: Location | None = None  # The line that split the data set
    subset: int | None = None  # A hash of the indices of a ``Subset``
    subset_length: int | None = None
    length: int | None = None  # Size of the index space that all ranks share. None if not known.
    batches: int | None = None  # Number of batches to come. None if only the job's code knows.
    followed: int = 0  # Number of indices of that space that all ranks record
    fetched: int = 0  # Number of batches that the training loop fetched
    marks: int = 0  # Number of batches that were followed by a backward pass
    joins: bool = False  # It is within ``join()``
    collectives: int | None = None
    """Number of collectives that the rank called meanwhile, including reductions and gathers."""
    reductions: int | None = None
    gathers: int | None = None
    armed_after: int | None = None  # ``armed`` when it was over
    closed: int = 0  # Unix nanoseconds at which it was over
    to_end: bool = False  # The loop in the source has no way out before its end
    draws: int = 0
    order: int | None = None  # A hash of the draws in their order
    falls: int = 0  # Number of draws that are smaller than the one before
    repeats: int = 0  # Number of recorded indices that were drawn again
    opaque: bool = False  # Its indices are not integers
    hits: tuple[int, ...] = ()  # Recorded indices that were drawn
    rows: tuple[tuple[int | None, ...], ...] = ()
    """Samples by content: the index (None without one), then hashes of the values."""
    head: Head | None = None
    sketch: Sketch | None = None


class GeneratorState(NamedTuple):
    """The state of a generator of random numbers at one moment. In JSON a list."""

    name: str  # ``torch``, ``numpy`` or ``python``
    place: str  # Read at the start of ``forward`` or ``backward``, or when a ``batch`` arrived
    block: int  # A hash of its block of numbers, which it replaces when all of them are used
    used: int  # Number of used values in that block


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRecord(Record, kind="random"):
    """States of the generators that all libraries share, in the order in which they were read.

    At most one per rank, about a few steps in a row, and one per worker of a loader.
    """

    time: int
    rank: int
    restart: int = 0
    worker: int | None = None  # The number of a loader's worker. None for the rank itself.
    dataset: str = ""  # The class of the worker's data set
    generation: int = 0  # Number of workers with that number that wrote before
    drops: bool = False  # A DDP module has layers for dropout
    states: tuple[GeneratorState, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord(PlacedRecord, kind="save"):
    """A checkpoint was saved. At most 50 per rank."""

    time: int
    file: str
    content: str  # ``module``, ``wrapper``, ``wrapped`` or ``data``
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoadRecord(PlacedRecord, kind="gpu_load"):
    """torch.load put tensors on a GPU. At most 50 per rank."""

    time: int = 0
    device: str
    device_uuid: str
    mapped: bool  # The call had a ``map_location``


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAppliedRecord(PlacedRecord, kind="not_applied"):
    """strict=False skipped most of a checkpoint."""

    number: int = -1
    matched: int  # Number of matching names
    given: int  # Number of names in the checkpoint
    wanted: int  # Number of names in the model
    missing: tuple[str, ...]  # The first names that are only in the model
    unexpected: tuple[str, ...]  # The first names that are only in the checkpoint
    prefix: str = ""  # The prefix of most names of one side
    of: str = ""  # Which side that is: ``checkpoint`` or ``model``


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRecord(Record, kind="applied"):
    """A later load replaced one that was not applied."""

    number: int
