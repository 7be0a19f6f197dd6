"""Records of the supervisor, and the status that NCCL's RAS reported, in Unix nanoseconds."""

from __future__ import annotations

from typing import NamedTuple

from ddpdoctor.run.records.base import Part, PlacedRecord, Record
from ddpdoctor.run.records.declaring import dataclass
from ddpdoctor.run.records.evidence import RankEvidence

# -- what NCCL's RAS said of the communicators of a job, over all its nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RasProcess(Part):
    """A process of the job that does not answer."""

    pid: int
    host: str
    """Its node's address."""
    dead: bool = False
    """It has not answered for a minute, and is given up."""
    rank: int = -1
    """Its rank in a communicator, -1 if it is not of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RasGroup(Part):
    """Ranks of a communicator of which the same is said."""

    value: str
    """A number of operations, a status, or an error."""
    many: int
    """How many they are."""
    ranks: tuple[int, ...] = ()
    """Which, in the communicator; empty where NCCL does not list them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RasDifference(Part):
    """What the ranks of a communicator differ in."""

    what: str
    """``AllReduce``: how many were launched, ``collective`` where NCCL adds up all kinds;
    ``status`` or ``error``."""
    groups: tuple[RasGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RasCommunicator(Part):
    """A communicator of which something is to be said."""

    size: int
    missing: tuple[RasProcess, ...] = ()
    differences: tuple[RasDifference, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ras(Part):
    """An answer of NCCL's RAS."""

    version: str = ""
    """NCCL's."""
    total: int = 0
    """Communicators, those of which nothing is to be said among them."""
    communicators: tuple[RasCommunicator, ...] = ()
    silent: tuple[RasProcess, ...] = ()
    """Processes of the job that do not answer."""
    trouble: str = ""
    """Why there is no answer."""


# -- records of the supervisor. Times are Unix nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(Record):
    """The job's command ended."""

    kind = "job"

    time: int
    status: int | None
    """Its exit status, negative for the number of a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRecord(Record):
    """A signal that was passed on to the job."""

    kind = "signal"

    time: int
    signal: int
    hang: bool = False
    """ddpdoctor ended a job that hung."""
    debugger: bool = False
    """ddpdoctor ended a job whose debugger was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExitRecord(Record):
    """A rank's process ended."""

    kind = "rank_exit"

    time: int
    rank: int
    restart: int
    pid: int = 0
    status: int | None
    """Its exit status, negative for the number of a signal; None where it was not seen."""
    oom: str = ""
    """What says that the kernel killed it for want of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangRecord(Record):
    """An examination of a job that makes no progress."""

    kind = "hang"

    time: int
    number: int
    restart: int
    seconds: float
    """For how long no rank had made progress."""
    everybody: bool = True
    """No rank made progress; False if some rank did while others waited for long."""
    fresh: bool = False
    """A rank is still in its first step."""
    limit: float = 0.0
    """Seconds without progress, but with a core, after which a rank is suspected."""
    launcher_works: bool = False
    """The launcher used the CPU during the examination."""
    file: str = ""
    """The file of the run directory that holds this record with ``ranks``."""
    trouble: str = ""
    """Why there is no such file."""
    ras: Ras | None = None
    """What NCCL's RAS said; None where there is none."""
    ranks: tuple[RankEvidence, ...] = ()
    """The evidence about each rank; in that file only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangOverRecord(Record):
    """The job goes on."""

    kind = "hang_over"

    time: int
    number: int
    """Which examination's hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCoreRecord(Record):
    """A rank that had no core for a part of the time in which it made no progress."""

    kind = "no_core"

    time: int
    rank: int
    restart: int
    since: int
    """When it entered its phase."""
    lost: int
    """Nanoseconds without a core since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugRecord(PlacedRecord):
    """A debugger came, stopped a rank, or went."""

    kind = "debug"

    time: int
    state: str
    """Of a rank: ``ready``, ``waits``, ``attached``, ``stopped``, ``running``, ``goes on``,
    ``detached``, ``gone``, ...; of the gateway: ``listening``, ``gate open``, ``refused``,
    ``flooded``, ``fault``, ..."""
    rank: int | None = None
    local_rank: int | None = None
    port: int | None = None
    """Where a debugger attaches to the rank."""
    pid: int | None = None
    place: str = ""
    """``path:line`` of the stop."""
    why: str = ""
    ranks: tuple[int, ...] = ()
    error: str = ""
    uid: int | None = None
    """The user of a client that was refused, None if that is not known."""
    door: str = ""
    """Where that client came in, or what is flooded, for a person."""
    beside: str = ""
    """A Unix socket for the clients of a port that is flooded."""

    @property
    def at(self) -> str:
        """Where the rank is held, ``path:line``; empty if that is not known."""
        return self.place or str(self.location or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory(Part):
    """Memory of a GPU that a rank holds."""

    rank: int
    restart: int
    device_uuid: str
    gpu: int
    """Index of the GPU."""
    name: str = ""
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState(Part):
    """How the GPU of a rank fares; None is not known."""

    rank: int
    restart: int
    device_uuid: str
    gpu: int
    """Its index."""
    others: int = 0
    """Processes on it that are none of the ranks'."""
    clock: float | None = None
    """Hz of the multiprocessors, the highest that was read."""
    power_limit: float | None = None
    """Watts."""
    throttled: tuple[str, ...] = ()
    """Throttle reasons that were present in every reading."""
    width: int | None = None
    """PCIe lanes."""
    links: int = 0
    """NVLinks, and then: those that are up."""
    links_up: int = 0
    remapping: bool = False
    """A faulty row of its memory waits for a reset, or has no spare row."""
    uncorrected: int | None = None
    """Memory errors that ECC could not correct."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusRecord(Record):
    """On which GPUs the ranks hold memory; written when that changes, or a rank is slow."""

    kind = "gpus"

    time: int
    held: tuple[HeldMemory, ...]
    states: tuple[GpuState, ...] = ()
    """Of the GPUs that ranks train on, where one of them was suspected to be slow."""


class RankMemory(NamedTuple):
    """Bytes that a rank holds; in JSON a list. None is not known, or no GPU."""

    rank: int
    rss: int | None
    """Of its process."""
    allocated: int | None
    """Given out by torch's CUDA allocator."""
    reserved: int | None
    """Taken by it from the GPU."""


class GpuVitals(NamedTuple):
    """What a GPU did; in JSON a list. What is not known is None."""

    host: str
    gpu: int
    """Its index."""
    utilization: float | None
    """From 0 to 1."""
    memory_used: int | None
    """Bytes."""
    memory_total: int | None
    """Bytes."""
    power: float | None
    """Watts."""
    temperature: float | None
    """Degrees Celsius."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VitalsRecord(Record):
    """Memory of the ranks and load of the GPUs at a moment; in a file beside the journals."""

    kind = "vitals"

    time: int
    restart: int
    ranks: tuple[RankMemory, ...] = ()
    gpus: tuple[GpuVitals, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspicionRecord(Record):
    """Ranks were asked to look closely at tensors."""

    kind = "suspicion"

    time: int
    restart: int
    module: int
    seen: int
    """The step whose fingerprints differ."""
    step: int
    """The first step that ranks look at."""
    tensors: tuple[int, ...]
    """Places among the names of the module."""


class CoreClock(NamedTuple):
    """The clock of the core that a rank ran on, in kHz; in JSON a list."""

    rank: int
    clock: int
    """The highest that was read."""
    most: int
    """The highest that such a core has."""
    readings: int


class BusyProcess(NamedTuple):
    """A process that used a core; in JSON a list."""

    pid: int
    share: float
    """Of one core."""
    core: int
    """The one that it ran on last."""
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequestRecord(Record):
    """Ranks were asked for samples of their stacks; and what was seen of the machine meanwhile."""

    kind = "profile"

    time: int
    restart: int
    asked: int
    """Which request."""
    rank: int | None = None
    """The rank that is slow, where ranks are asked."""
    busy: tuple[BusyProcess, ...] = ()
    clocks: tuple[CoreClock, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLocation(Part):
    """A line of code, by name."""

    path: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRecord(Record):
    """A finding was reported."""

    kind = "finding"

    time: int
    restart: int
    number: int | None
    """Its place among all that was reported and withdrawn."""
    step: int | None = None
    """How far the ranks were."""
    code: str
    severity: str
    message: str
    ranks: tuple[int, ...] = ()
    location: FoundLocation | None = None
    evidence: tuple[str, ...] = ()
    fix: str = ""
    paste: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetractionRecord(Record):
    """A finding that was reported is withdrawn."""

    kind = "retraction"

    time: int
    number: int
    retracts: int
    """Number of that finding."""
    code: str
    ranks: tuple[int, ...]
    why: str
    by: str | None
    """The code that explains it."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwatchedRecord(Record):
    """Why nothing is known of the ranks."""

    kind = "unwatched"

    time: int
    why: str
