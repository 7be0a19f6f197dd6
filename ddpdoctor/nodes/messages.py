"""The messages between the head, which is the node of rank 0, and the other nodes.

Times are Unix nanoseconds of the sender's clock.
"""

from __future__ import annotations

from ddpdoctor.run.records.base import Part, Record, dataclass
from ddpdoctor.run.records.typed_json import kinds_of

PROTOCOL = 1  # Version of the messages. Nodes with different ones do not exchange records.

# -- from a node to the head


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Record):
    """A node introduces itself, again after each reconnection."""

    kind = "hello"

    protocol: int
    host: str
    directory: str = ""  # Its run directory
    version: str = ""  # Its version of ddpdoctor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Record):
    """A node reads the head's clock, and shows that it is alive."""

    kind = "ping"

    sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Began(Record):
    """An attempt of the job began on the node. Its time is in the head's clock."""

    kind = "began"

    restart: int  # The node's own number of the attempt
    world_size: int
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock(Record):
    """The lead of the head's clock over the node's, in nanoseconds."""

    kind = "clock"

    ahead: int
    error: int  # Maximum error of :attr:`ahead`, in nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Part):
    """A part of a file of a run directory."""

    name: str
    size: int
    append: bool = False  # Whether the bytes follow those sent before, not replace the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Files(Record):
    """New contents of files, one after the other in the blob."""

    kind = "files"

    number: int  # From 1, without a gap
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Record):
    """The answer to a question. The blob holds it."""

    kind = "answer"

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Record):
    """The job's command has ended on the node, and all its records are sent."""

    kind = "leave"

    status: int | None = None


# -- from the head to a node


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Record):
    """The head accepts a node."""

    kind = "welcome"

    protocol: int
    host: str
    directory: str  # The run directory that holds the records of all nodes
    taken: int = 0  # Number of the last `Files` that it has received from this node


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong(Record):
    """The head's clock."""

    kind = "pong"

    sent: int  # As in the `Ping`
    received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered(Record):
    """The number of an attempt in the head's run directory."""

    kind = "numbered"

    restart: int  # The node's own number
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Record):
    """The head has written the files of a message."""

    kind = "taken"

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Record):
    """A request from the head's supervisor to all ranks. The blob is its file's new content."""

    kind = "request"

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Record):
    """A question to the node. The blob holds its arguments."""

    kind = "question"

    number: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndHang(Record):
    """The head has ended its part of a job that hangs (``--kill-on-hang``)."""

    kind = "end_hang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Over(Record):
    """The head accepts no more records."""

    kind = "over"

    killed: bool = False  # Whether its ddpdoctor was killed. Otherwise the job has ended there.


# -- debuggers, in both directions


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Record):
    """Whether a debugger holds ranks: of the node, or, from the head, of any other node."""

    kind = "held"

    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugRank(Part):
    """A rank to which a debugger can be attached."""

    index: int  # Index of its port on the node
    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugRanks(Record):
    """The ranks of the node to which a debugger can be attached."""

    kind = "debug_ranks"

    ranks: tuple[DebugRank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOpened(Record):
    """A debugger on the head has connected to the port of a rank."""

    kind = "stream_opened"

    number: int
    index: int  # As in `DebugRank`


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamData(Record):
    """Bytes of a connection. The blob holds them."""

    kind = "stream_data"

    number: int
    at: int  # Number of bytes sent before


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTaken(Record):
    """All bytes up to this position are delivered, so more may be sent."""

    kind = "stream_taken"

    number: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClosed(Record):
    """A connection is closed. No bytes follow."""

    kind = "stream_closed"

    number: int


ForDebuggers = Held | DebugRanks | StreamOpened | StreamData | StreamTaken | StreamClosed

MESSAGES = kinds_of(__name__)
"""All messages, by kind."""
