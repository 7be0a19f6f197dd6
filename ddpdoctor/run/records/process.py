"""Records of a rank's process: its identity and its end. Times are Unix nanoseconds."""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import CodeFrame, Part, PlacedRecord, Record, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRecord(Record, kind="open"):
    """A process became a rank: its identity, host and versions."""

    format: int  # Version of the rank's files
    rank: int
    time: int = 0
    world_size: int = 0
    local_rank: int | None = None
    restart: int = 0
    pid: int = 0
    parent: int = 0  # Process id of its parent
    host: str = ""
    namespace: str | None = None
    """Where its pid is valid (`ddpdoctor.run.names.namespace`). None if not known."""
    backend: str = ""
    kept_timeout: float | None = None
    """Seconds of the shortest timeout of collectives that cannot be lifted while a debugger holds a
    rank. None if all can."""
    timeout: float | None = None  # Seconds of the timeout of collectives. None if not known.
    joined: Location | None = None  # The line that called ``init_process_group``
    argv: tuple[str, ...] = ()
    launcher: str = ""  # ``torchrun`` or ``other``
    versions: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of NCCL, gloo and torch.distributed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecord(Record, kind="store"):
    """The store at which the ranks of a job met, if some may be on other nodes."""

    host: str = ""  # Host name or address of the TCPStore
    port: int = 0
    file: str = ""  # The file of a FileStore. Empty for a TCPStore.
    job: str = ""  # torchrun's id of the job. Empty without torchrun.
    local_world_size: int = 0  # Number of ranks on this node. 0 if unknown.


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideRecord(PlacedRecord, kind="override", kept=64):
    """ddpdoctor overrode an argument or a seed of the job for `ddpdoctor scale` or `parity`."""

    owner: str  # The class, such as ``DistributedDataParallel``, or ``seed``
    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord(Record, kind="end"):
    """The normal end of a rank's script."""

    time: int
    steps: int = 0
    armed: int = 0  # Forward passes whose backward is all-reduced
    dropped: int = 0  # Number of records lost because the queue was full or the disk refused them
    spent: int = 0  # Nanoseconds of budgeted diagnosis, including an estimate of untimed work
    over: int = 0  # Nanoseconds of the period in which they were spent
    followed: int = 0  # Nanoseconds spent on following the steps, estimated from timed ones


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWorkRecord(Record, kind="own_work", kept=64):
    """A rank has been outside of all phases for a long time. At most 64 per rank."""

    time: int
    since: int  # Time at which the last phase ended
    frames: tuple[Location, ...]  # The current lines of the training thread, innermost first


@dataclass(frozen=True, slots=True, kw_only=True)
class PortHolder(Part):
    """The process that holds a port."""

    pid: int
    name: str = ""  # Its command line
    ours: bool = False  # It belongs to this job
    rank: str | None = None  # The rank that its launcher gave it
    itself: bool = False  # It is the process that needs the port


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceFacts(Part):
    """The file, address or port that an exception is about. None if not known."""

    path: str = ""
    access: str = ""  # ``read`` or ``write``
    size: int = 0  # Bytes of the file
    free: int | None = None  # Free bytes in its file system, of ``total``
    total: int | None = None
    limit: int | None = None  # Maximum bytes of a file
    url: str = ""  # The address of a download, without passwords and queries
    port: int | None = None  # The port of the job's store
    spawned: bool = False  # A worker of torchrun started the process
    holder: PortHolder | None = None


class ReadFile(NamedTuple):
    """A file that was opened for reading. In JSON a list."""

    path: str  # As it was given
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord(PlacedRecord, kind="file"):
    """A rank is about to change a file or directory. Once for each, at most 64 times per rank."""

    time: int
    what: str
    """``write`` (opened for it), ``make`` a directory, ``move`` it away, ``replace`` it by a moved
    file, ``remove``."""
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterError(Part):
    """An exception that was raised while handling, or because of, another one."""

    exception: str
    message: str = ""
    path: str = ""
    line: int = 0

    @property
    def location(self) -> Location | None:
        """The line that raised it."""
        return Location(self.path, self.line) if self.path else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfProcess(PlacedRecord):
    """Common fields of the ends of processes, ranks or not."""

    time: int
    pid: int = 0
    step: int | None = None  # The current step. None for a process that is not a rank.
    armed: int = 0  # Forward passes so far whose backward is all-reduced
    phase: str = ""
    rank: int | None = None
    """This and the next fields come from the environment of a process that is not a rank."""
    restart: int = 0
    leads_session: bool = False
    """It is a worker of the launcher, not a program that a worker started."""
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord(EndOfProcess, kind="exit"):
    """A call of sys.exit, os._exit or the like."""

    how: str  # ``sys.exit`` or ``os._exit``
    status: int
    said: str | None = None  # The text that was given instead of a status
    refused: str = ""  # The arguments that ``argparse`` refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord(EndOfProcess, kind="error"):
    """An uncaught exception, of a rank or of another process of the job."""

    exception: str  # Its class, with the module unless that is the script or ``builtins``
    message: str = ""
    user_frames: tuple[CodeFrame, ...] = ()  # The innermost last
    traceback: str = ""  # The end of its text
    outer: OuterError | None = None  # The exception that was finally raised
    collective: str = ""  # The collective in which it was raised
    file: ResourceFacts | None = None
    read: tuple[ReadFile, ...] = ()  # The files that were opened last for reading, newest first
    left: ExitRecord | None = None
    """The call by which the script ended itself after it caught the exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadErrorRecord(ErrorRecord, kind="thread_error"):
    """An exception that ended a thread. A few per rank."""

    thread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownErrorRecord(ErrorRecord, kind="shown_error"):
    """The exception whose traceback was printed last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingErrorRecord(ErrorRecord, kind="pending_error"):
    """A collective was called while this exception was being handled.

    It may be the end of a ``finally`` or ``with``, which the other ranks do not reach. Written once
    for each line and kind of exception, at most 16 times per rank.
    """

    called_at: Location | None = None  # The line that called the collective


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStoreRecord(EndOfProcess, kind="own_store"):
    """A rank connects to a store of the script that no rank serves."""

    host: str | None
    port: str
    launcher: str  # ``host:port`` of torchrun's store
    spawned: bool  # A worker of torchrun started the process


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord(Record, kind="fault"):
    """An error of ddpdoctor itself, once for each part."""

    error: str
    time: int = 0
    hook: str = ""  # The part of the probe
    part: str = ""  # The part of the supervisor
    places: tuple[str, ...] = ()  # Lines of ddpdoctor, ``file:line``, innermost first


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRecord(Record, kind="limit"):
    """A rank writes no more records of a kind: there were too many. Once for each kind."""

    time: int
    of: str  # The kind


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRankRecord(PlacedRecord, kind="local_rank"):
    """The script parsed a local rank from an option that torchrun does not set."""

    parsed: int
    environment: int  # The value of LOCAL_RANK
    used: Location | None = None  # The line that uses it


DATA_PARALLEL_AFTER = 16  # `DataParallelRecord` is written before this step, or at the rank's end


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelRecord(PlacedRecord, kind="data_parallel"):
    """An nn.DataParallel was built."""
