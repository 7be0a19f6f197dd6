"""Records of the supervisor's journal, and the evidence of a hang.

An examination (`ddpdoctor.nodes.hang_examination`) makes one `RankEvidence` for each rank. They
are the ``ranks`` of a `HangRecord`, and the rules for hangs read them back.
"""

from __future__ import annotations

from dataclasses import dataclass as positional
from dataclasses import field
from typing import NamedTuple

from ddpdoctor.run.records.base import Part, PlacedRecord, Record, dataclass
from ddpdoctor.run.ring import Collective

# -- stacks and process states


class Frame(NamedTuple):
    """One frame of Python code."""

    path: str  # The file, absolute if known. ``<string>`` and the like for code without a file.
    line: int  # 0 if it is not known
    function: str


class Variable(NamedTuple):
    """A local variable of a frame."""

    frame: int  # The place of its frame in :attr:`Thread.frames`
    name: str
    value: str  # A summary of it


@positional(frozen=True)
class Thread(Part):
    """The stack of one thread."""

    ident: int  # ``threading.get_ident()`` of the thread. 0 if it is not known
    name: str  # Its name, empty if it is not known
    current: bool
    """Whether ``faulthandler`` said that this thread wrote the stacks. False in all others."""
    frames: tuple[Frame, ...]  # Outermost first
    awaited: bool = False
    """Whether the interpreter is known to wait for it at the end: it is not a daemon."""
    variables: tuple[Variable, ...] = ()
    """Variables of the user's innermost frames in the main thread, if requested."""


@positional(frozen=True)
class ChildState(Part):
    """A child process of a rank, such as a DataLoader's worker."""

    pid: int
    letter: str  # As :attr:`ProcessState.letter`
    cpu_seconds: float
    command: str  # The beginning of its command line


@positional(frozen=True)
class ProcessState(Part):
    """The process of a rank, as the kernel sees it."""

    letter: str = ""
    """The main thread's state as in ``/proc/PID/stat``: R runs, S sleeps, D waits for a device or
    disk, T is stopped, t is held by a tracer, Z has ended. Empty if there is no such process."""
    cpu_seconds: float = 0.0  # CPU time of the process so far, user and system
    wchan: str = ""
    """The kernel function in which the main thread sleeps. Empty if unknown."""
    children: tuple[ChildState, ...] = ()  # Its child processes, ascending by pid


MAIN = "MainThread"  # The name of a process's main thread, as in ``threading``


@positional(frozen=True)
class RankStacks(Part):
    """The stacks of one rank, or the reason why there are none."""

    rank: int
    restart: int
    pid: int  # 0 if it is not known
    host: str
    threads: tuple[Thread, ...] = ()  # The main thread first, if it is known
    native: tuple[str, ...] = ()
    """Native frames of the main thread below its innermost Python frame, outermost first, from
    py-spy. Empty if not requested or not available."""
    state: ProcessState = field(default_factory=ProcessState)
    gil_held: bool = False
    """Whether native code held the GIL for so long that no Python could run in the rank."""
    trouble: str = ""
    """Why there are no stacks, in a few words: ``stopped (SIGSTOP)``. Empty otherwise."""
    note: str = ""  # Why other parts are missing, such as native frames, in a few words
    world_size: int = 0
    """World size passed to the running ``init_process_group``. 0 if none runs, or if unknown."""

    @property
    def main(self) -> Thread | None:
        """The main thread, which is the one that trains."""
        return next((thread for thread in self.threads if thread.name == MAIN), None)


# -- evidence from processes, GPUs and Flight Recorders


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessActivity(Part):
    """The activity of a process between two samples, about a second apart."""

    seconds: float = 0.0
    letters: str = ""
    """Its state at the first and at the second sample, as :attr:`ProcessState.letter`."""
    busy: float = 0.0  # Number of cores that it used, without its waits for a core
    children_busy: float = 0.0
    children_letters: str = ""  # The newest state of each child process
    cpu: float = 0.0  # Number of cores that it used
    ran: float = 0.0  # Seconds of CPU time since the process began
    children_cpu: float = 0.0
    characters: int = 0  # Bytes that went through ``read`` and ``write``, including its children's
    disk: int = 0  # Bytes that devices moved for it and its children
    input: bool = False  # It slept in ``read`` on its standard input
    terminal: bool = False  # That input is a terminal
    network: bool = False  # It waited for a socket
    children_network: bool = False
    switches: int = 0  # Voluntary context switches of its main thread
    since_cpu: float | None = None
    """Cores used by its main thread since the previous examination. None if that is not known."""
    since_children_cpu: float | None = None
    """Cores used by the main threads of its children since then."""
    wrote: int = 0  # Bytes that it wrote after the examination, while nothing was requested from it


class GpuMark(NamedTuple):
    """A marker of the probe in a GPU's stream; in JSON a list."""

    phase: str  # The phase that it ends
    queued: int  # When the host queued it, in Unix nanoseconds
    passed: bool  # The GPU has passed it


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightCall(Part):
    """One collective in a Flight Recorder of torch."""

    id: int = 0  # Its position among all recorded calls
    group: str = ""  # Name of the process group; ``0`` is the default group
    members: str = ""  # Ranks of the group, ``0-3``. Empty if they are not known
    sequence: int = 0  # Its number in the group, counted for each backend
    point_to_point: bool = False  # It is a send or a receive
    backend: str = ""
    name: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()  # Shapes of its input tensors
    dtypes: tuple[str, ...] = ()
    created: int = 0  # Unix nanoseconds
    retired: bool = False
    state: str = ""  # ``scheduled``, ``started`` or ``completed``. Empty with gloo
    duration: float | None = None
    """Milliseconds on the GPU; known only where the starts of collectives are recorded."""
    lines: tuple[str, ...] = ()  # The user's lines that led to it, ``path:line``, innermost first

    @property
    def done(self) -> bool:
        """Whether it has completed."""
        return self.retired or self.state == "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightAnswer(Part):
    """The file with which a rank answers an examination."""

    asked: int = 0  # The number of the examination
    entries: tuple[FlightCall, ...] | None = None  # None if the rank has no Flight Recorder
    trouble: str = ""  # Why the Flight Recorder could not be read
    device: tuple[GpuMark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit(Part):
    """The end of a rank's process."""

    time: int  # Unix nanoseconds
    status: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence(Part):
    """The evidence about one rank from an examination, or from a dump of a Flight Recorder."""

    rank: int = -1
    restart: int = 0
    pid: int = 0
    host: str = ""
    backend: str = ""
    world_size: int = 0
    exit: ProcessExit | None = None  # The end of its process, if that was seen
    ended: bool = False  # Its script has finished normally
    phase: str | None = None
    """The phase on its status page. None if it has not joined a process group."""
    since: int = 0  # When it entered that phase, in Unix nanoseconds
    step: int = 0  # Number of closed steps; -1 without a probe
    armed: int = 0  # Number of forwards whose backward was to be all-reduced
    reduced: int = 0  # Number of backwards that were all-reduced
    collective: str = ""  # The collective on its status page
    site: str = ""  # The line on its status page, ``path:line``
    sites: dict[str, str] = field(default_factory=dict)
    """The lines at which it entered phases, by phase."""
    silent: int | None = None  # Nanoseconds since its writing thread was awake
    waited: int = 0  # The order of the asynchronous collective that it waits for. 0 if none
    collectives: tuple[Collective, ...] = ()
    """Its newest collectives called from Python, oldest first."""
    flight: tuple[FlightCall, ...] | None = None
    """Its newest collectives from its Flight Recorder. None if that did not answer."""
    flight_trouble: str = ""  # Why its Flight Recorder could not be read
    device: tuple[GpuMark, ...] = ()  # The probe's newest markers in the stream of its GPU
    sends: bool = False  # A send or a receive is not done
    stacks: RankStacks | None = None
    later: RankStacks | None = None  # Its stacks a second later, if it did not wait in a collective
    workers: tuple[tuple[RankStacks, ...], ...] = ()
    """The stacks of each worker of its DataLoader, captured twice."""
    activity: ProcessActivity | None = None  # None if its process could not be watched
    launcher_works: bool = False  # Whether the job's launcher was working
    lost: float = 0.0  # Seconds of its silence in which it, or one of its children, had no core
    steady: int = 0  # Number of examinations in a row in which the rank did the same
    steadied: float = 0.0  # Seconds that it had been silent, with a core, at the last of them
    dump: str = ""
    """The Flight Recorder file that this was read from. Empty for a rank that was examined."""
    forgets: bool = False  # That file lacks older collectives
    timeout: int = 0
    """Nanoseconds after which the collective that it waits for times out, by that file."""


# -- The report of NCCL's RAS about the communicators of a job on all nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RasProcess(Part):
    """A process of the job that does not respond."""

    pid: int
    host: str  # The address of its node
    dead: bool = False  # It has not responded for a minute, and NCCL has given up on it
    rank: int = -1  # Its rank in a communicator, -1 without one


@dataclass(frozen=True, slots=True, kw_only=True)
class RasGroup(Part):
    """Ranks of a communicator with equal values."""

    value: str  # A number of operations, a status or an error
    many: int  # Number of ranks
    ranks: tuple[int, ...] = ()  # The ranks in the communicator. Empty if NCCL does not list them.


@dataclass(frozen=True, slots=True, kw_only=True)
class RasDifference(Part):
    """A difference between the ranks of a communicator."""

    what: str
    """``AllReduce`` and the like: launched operations. ``collective`` if NCCL adds up all kinds.
    ``status`` or ``error``."""
    groups: tuple[RasGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RasCommunicator(Part):
    """A communicator with a problem."""

    size: int
    missing: tuple[RasProcess, ...] = ()
    differences: tuple[RasDifference, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ras(Part):
    """A response of NCCL's RAS."""

    version: str = ""  # The version of NCCL
    total: int = 0  # Number of communicators, with or without a problem
    communicators: tuple[RasCommunicator, ...] = ()
    silent: tuple[RasProcess, ...] = ()  # Processes of the job that do not respond
    trouble: str = ""  # Why there is no response


# -- Records


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(Record, kind="job"):
    """The job's command ended."""

    time: int
    status: int | None  # Its exit status, negative for the number of a signal
    why: str = ""  # Why it was asked to end, according to its scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRecord(Record, kind="signal"):
    """A signal was passed on to the job."""

    time: int
    signal: int
    hang: bool = False  # ddpdoctor sent it to end a hanging job
    debugger: bool = False  # ddpdoctor sent it because the debugger was stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExitRecord(Record, kind="rank_exit"):
    """A rank's process ended."""

    time: int
    rank: int
    restart: int
    pid: int = 0
    status: int | None
    """Its exit status, negative for the number of a signal. None if it is not known."""
    oom: str = ""  # The evidence that the kernel killed it because memory ran out


@dataclass(frozen=True, slots=True, kw_only=True)
class HangRecord(Record, kind="hang"):
    """An examination of a job that makes no progress."""

    time: int
    number: int
    restart: int
    seconds: float  # Seconds in which no rank made progress
    everybody: bool = True
    """Whether no rank made progress. False if some did while others waited for a long time."""
    fresh: bool = False  # A rank is still in its first step
    limit: float = 0.0  # Seconds without progress, but with a core, after which a rank is suspected
    launcher_works: bool = False  # The launcher used the CPU during the examination
    file: str = ""  # The file of the run directory that holds this record with ``ranks``
    trouble: str = ""  # Why there is no such file
    ras: Ras | None = None  # The response of NCCL's RAS. None if there is none
    links: tuple[str, ...] = ()  # Interfaces of the supervisor's machine without a link
    ranks: tuple[RankEvidence, ...] = ()  # The evidence about each rank; in that file only


@dataclass(frozen=True, slots=True, kw_only=True)
class HangOverRecord(Record, kind="hang_over"):
    """The job continues."""

    time: int
    number: int  # Number of the examination of that hang


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCoreRecord(Record, kind="no_core"):
    """A rank that had no core for part of the time in which it made no progress."""

    time: int
    rank: int
    restart: int
    since: int  # Time at which it entered its phase
    lost: int  # Nanoseconds without a core since then


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugRecord(PlacedRecord, kind="debug"):
    """A debugger attached, stopped a rank, or detached."""

    time: int
    state: str
    """Of a rank: ``ready``, ``waits``, ``attached``, ``stopped``, ``running``, ``goes on``,
    ``detached``, ``gone``. Of a rank of another node: ``port`` (it has one here), ``lost`` (with
    its node). Of the gateway: ``listening``, ``gate open``, ``refused``, ``flooded``, ``fault``."""
    rank: int | None = None
    local_rank: int | None = None
    port: int | None = None
    """The port at which a debugger attaches to the rank. None in the records of other nodes."""
    pid: int | None = None
    place: str = ""  # ``path:line`` of the stop
    why: str = ""
    ranks: tuple[int, ...] = ()
    error: str = ""
    uid: int | None = None  # The user of a refused client, None if not known
    endpoint: str = ""  # The endpoint that the client used, or that is flooded, in words
    beside: str = ""  # A Unix socket for clients of a flooded port

    @property
    def at(self) -> str:
        """Where the rank is held, ``path:line``. Empty if not known."""
        return self.place or str(self.location or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory(Part):
    """GPU memory that a rank holds."""

    rank: int
    restart: int
    device_uuid: str
    gpu: int  # Index of the GPU
    name: str = ""
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState(Part):
    """The state of a rank's GPU. None if not known."""

    rank: int
    restart: int
    device_uuid: str
    gpu: int  # Its index
    others: int = 0  # Processes on it that are not ranks of the job
    clock: float | None = None  # Highest measured clock of the multiprocessors, in Hz
    power_limit: float | None = None  # Watts
    throttled: tuple[str, ...] = ()  # Throttle reasons that were present in every sample
    width: int | None = None  # PCIe lanes
    links: int = 0  # Number of NVLinks. ``links_up``: of those that are up.
    links_up: int = 0
    remapping: bool = False  # A faulty memory row waits for a reset, or has no spare row
    uncorrected: int | None = None  # Memory errors that ECC could not correct


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusRecord(Record, kind="gpus"):
    """The GPUs on which ranks hold memory. Written when that changes or a rank is slow."""

    time: int
    held: tuple[HeldMemory, ...]
    states: tuple[GpuState, ...] = ()
    """The GPUs that ranks train on, if one of them is suspected to be slow."""


class RankMemory(NamedTuple):
    """Bytes that a rank holds. In JSON a list. None if not known or without GPU."""

    rank: int
    rss: int | None  # Resident memory of its process
    allocated: int | None  # Allocated by torch's CUDA allocator
    reserved: int | None  # Reserved by the allocator on the GPU


class GpuVitals(NamedTuple):
    """The load of a GPU. In JSON a list. None if not known."""

    host: str
    gpu: int  # Its index
    utilization: float | None  # From 0 to 1
    memory_used: int | None  # Bytes
    memory_total: int | None  # Bytes
    power: float | None  # Watts
    temperature: float | None  # Degrees Celsius


@dataclass(frozen=True, slots=True, kw_only=True)
class VitalsRecord(Record, kind="vitals"):
    """A sample of ranks' memory and GPUs' load, in a file next to the journals."""

    time: int
    restart: int
    ranks: tuple[RankMemory, ...] = ()
    gpus: tuple[GpuVitals, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspicionRecord(Record, kind="suspicion"):
    """Ranks were asked to write out tensors."""

    time: int
    restart: int
    module: int
    seen: int  # The step whose fingerprints differ
    step: int  # The first step that ranks examine
    tensors: tuple[int, ...]  # Indices into the names of the module


class CoreClock(NamedTuple):
    """The clock of the core that a rank ran on, in kHz. In JSON a list."""

    rank: int
    clock: int  # The highest measured clock
    most: int  # The highest possible clock of the core
    readings: int


class BusyProcess(NamedTuple):
    """A process that used a core. In JSON a list."""

    pid: int
    share: float  # Share of one core
    core: int  # The core that it ran on last
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequestRecord(Record, kind="profile"):
    """Ranks were asked for samples of their stacks. Includes the machine's activity meanwhile."""

    time: int
    restart: int
    asked: int  # Number of the request
    rank: int | None = None  # The slow rank, if ranks are asked because of one
    busy: tuple[BusyProcess, ...] = ()
    clocks: tuple[CoreClock, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLocation(Part):
    """A line of code, by name."""

    path: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRecord(Record, kind="finding"):
    """A finding was reported."""

    time: int
    restart: int
    number: int | None  # Its number among all reports and withdrawals
    step: int | None = None  # The step that the ranks had reached
    code: str
    severity: str
    message: str
    ranks: tuple[int, ...] = ()
    location: FoundLocation | None = None
    evidence: tuple[str, ...] = ()
    fix: str = ""
    paste: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetractionRecord(Record, kind="retraction"):
    """A reported finding is withdrawn."""

    time: int
    number: int
    retracts: int  # Number of that finding
    code: str
    ranks: tuple[int, ...]
    why: str
    by: str | None  # The code of the finding that explains it
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord(Record, kind="node"):
    """Another node of the job joined, left, or was lost."""

    time: int
    number: int  # Its number in this run directory, from 1
    host: str
    state: str  # ``joined``, ``lost``, ``back``, ``left`` or ``refused``
    place: str = ""  # The end of the namespaces of its ranks
    directory: str = ""  # Its run directory
    version: str = ""  # Version of ddpdoctor on it
    ahead: int | None = None  # Nanoseconds by which our clock is ahead of its clock, if known
    error: int = 0  # Maximum error of :attr:`ahead`, in nanoseconds
    status: int | None = None  # Exit status of its command, once it has left
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRecord(Record, kind="link"):
    """Traffic of a node's ranks to another node's address, while they waited most of the time."""

    time: int
    host: str  # The node that sent
    source: str  # Its address
    target: str  # The address of the other node
    seconds: float  # Duration of the measurement
    sent: int  # Bytes
    busy: float = 0.0
    """The share of the time in which the link was full: a connection had data in flight, as fast
    as the path delivers. 0 if it was not."""
    rate: int = 0  # Bytes per second that it delivered then
    rtt: float = 0.0  # Round trip in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecord(Record, kind="head"):
    """The state of the link from this node to the head, which judges all ranks."""

    time: int
    state: str  # ``linked``, ``lost``
    host: str = ""
    directory: str = ""  # Its run directory


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwatchedRecord(Record, kind="unwatched"):
    """The reason why nothing is known about the ranks."""

    time: int
    why: str
