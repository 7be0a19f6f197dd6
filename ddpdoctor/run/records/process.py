"""Records of a rank's process: who it is, and how it ends. Times are Unix nanoseconds."""

from __future__ import annotations

from dataclasses import field

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import CodeFrame, Part, PlacedRecord, Record
from ddpdoctor.run.records.declaring import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRecord(Record):
    """A process became a rank: who it is, where, and with what versions."""

    kind = "open"

    format: int
    """Version of the rank's files."""
    rank: int
    time: int = 0
    world_size: int = 0
    local_rank: int | None = None
    restart: int = 0
    pid: int = 0
    parent: int = 0
    """Process id of its parent."""
    host: str = ""
    namespace: str | None = None
    """Where its pid is valid (`ddpdoctor.run.names.namespace`); None if it is not known."""
    backend: str = ""
    kept_timeout: float | None = None
    """Seconds of the shortest timeout of collectives that cannot be lifted while a debugger holds a
    rank; None where all can."""
    argv: tuple[str, ...] = ()
    launcher: str = ""
    """``torchrun`` or ``other``."""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideRecord(PlacedRecord):
    """ddpdoctor overrode an argument of the job's, as `ddpdoctor scale` was asked to."""

    kind = "override"
    kept = 64

    owner: str
    """The class: ``DistributedDataParallel``."""
    name: str
    value: str
    was: str = ""
    """What the script gave; empty where it gave nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord(Record):
    """The regular end of a rank's script."""

    kind = "end"

    time: int
    steps: int = 0
    armed: int = 0
    """Forward passes whose backward was to be all-reduced."""
    dropped: int = 0
    """Records that did not fit into the queue, or that the disk refused."""
    spent: int = 0
    """Nanoseconds that diagnosis with a budget took."""
    over: int = 0
    """Nanoseconds in which it did."""
    followed: int = 0
    """Nanoseconds that it took to follow the steps, estimated from those that were clocked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortHolder(Part):
    """The process that holds a port."""

    pid: int
    name: str = ""
    """Its command line."""
    ours: bool = False
    """It belongs to this job."""
    rank: str | None = None
    """As its launcher numbered it."""
    itself: bool = False
    """It is the process that wanted the port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceFacts(Part):
    """The file, address or port that an exception is about; what is not known is None."""

    path: str = ""
    access: str = ""
    """``read`` or ``write``."""
    size: int = 0
    """Bytes of the file."""
    free: int | None = None
    """Bytes that are free in its file system, of ``total``."""
    total: int | None = None
    limit: int | None = None
    """Bytes that a file may have."""
    url: str = ""
    """What was to be downloaded, without passwords and queries."""
    port: int | None = None
    """That of the job's store."""
    spawned: bool = False
    """A worker of torchrun's has started the process."""
    holder: PortHolder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterError(Part):
    """An exception in which another one was raised again."""

    exception: str
    message: str = ""
    path: str = ""
    line: int = 0

    @property
    def location(self) -> Location | None:
        """Where it was raised."""
        return Location(self.path, self.line) if self.path else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfProcess(PlacedRecord):
    """What the ends of processes have in common, ranks or not."""

    time: int
    pid: int = 0
    step: int | None = None
    """The step under way; None of a process that is no rank."""
    armed: int = 0
    """Forward passes so far whose backward was to be all-reduced."""
    phase: str = ""
    rank: int | None = None
    """This and what follows is known of processes that are no ranks, by their environment."""
    restart: int = 0
    leads_session: bool = False
    """It is a worker of the launcher's, and not a program that a worker started."""
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord(EndOfProcess):
    """A call of sys.exit, os._exit or the like."""

    kind = "exit"

    how: str
    """``sys.exit`` or ``os._exit``."""
    status: int
    said: str | None = None
    """What was given instead of a status."""
    refused: str = ""
    """What ``argparse`` refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord(EndOfProcess):
    """An uncaught exception, of a rank or of another process of the job."""

    kind = "error"

    exception: str
    """The name of its class, with its module if that is not the script or ``builtins``."""
    message: str = ""
    user_frames: tuple[CodeFrame, ...] = ()
    """The innermost last."""
    traceback: str = ""
    """Its end."""
    outer: OuterError | None = None
    """What this one was raised again as."""
    collective: str = ""
    """The collective in which it was raised."""
    file: ResourceFacts | None = None
    left: ExitRecord | None = None
    """The call by which the script ended itself once it had caught the exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadErrorRecord(ErrorRecord):
    """An exception that ended a thread; a few of a rank."""

    kind = "thread_error"

    thread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownErrorRecord(ErrorRecord):
    """The exception whose traceback was printed last."""

    kind = "shown_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStoreRecord(EndOfProcess):
    """A rank joins a store of the script that no rank opens."""

    kind = "own_store"

    host: str | None
    port: str
    launcher: str
    """``host:port`` of the store that torchrun keeps."""
    spawned: bool
    """A worker of torchrun's has started the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord(Record):
    """An error of ddpdoctor itself; each part of it reports one."""

    kind = "fault"

    error: str
    time: int = 0
    hook: str = ""
    """Which part of the probe."""
    part: str = ""
    """Which part of the supervisor."""
    places: tuple[str, ...] = ()
    """Lines of ddpdoctor, ``file:line``, innermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRankRecord(PlacedRecord):
    """A local rank that the script parsed and torchrun did not fill."""

    kind = "local_rank"

    parsed: int
    environment: int
    """LOCAL_RANK."""
    used: Location | None = None
    """Where the script uses it."""


DATA_PARALLEL_AFTER = 16
"""The step before which it is written that an nn.DataParallel was built, or at the rank's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelRecord(PlacedRecord):
    """An nn.DataParallel was built."""

    kind = "data_parallel"
