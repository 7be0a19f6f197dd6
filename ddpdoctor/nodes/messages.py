"""The messages between the head, which is the node of rank 0, and the other nodes.

Times are Unix nanoseconds of the sender's clock.
"""

from __future__ import annotations

from ddpdoctor.run.records.base import Part, Record, dataclass
from ddpdoctor.run.records.typed_json import kinds_of

PROTOCOL = 1  # Version of the messages. Nodes with different ones do not exchange records.

# -- from a node to the head


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Record, kind="hello"):
    """A node introduces itself, again after each reconnection."""

    protocol: int
    host: str
    directory: str = ""  # Its run directory
    version: str = ""  # Its version of ddpdoctor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Record, kind="ping"):
    """A node reads the head's clock, and shows that it is alive."""

    sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Began(Record, kind="began"):
    """An attempt of the job began on the node. Its time is in the head's clock."""

    restart: int  # The node's own number of the attempt
    world_size: int
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock(Record, kind="clock"):
    """The lead of the head's clock over the node's, in nanoseconds."""

    ahead: int
    error: int  # Maximum error of :attr:`ahead`, in nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Part):
    """A part of a file of a run directory."""

    name: str
    size: int
    append: bool = False  # Whether the bytes follow those sent before, not replace the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Files(Record, kind="files"):
    """New contents of files, one after the other in the blob."""

    number: int  # From 1, without a gap
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Record, kind="answer"):
    """The answer to a question. The blob holds it."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Record, kind="leave"):
    """The job's command has ended on the node, and all its records are sent."""

    status: int | None = None


# -- from the head to a node


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Record, kind="welcome"):
    """The head accepts a node."""

    protocol: int
    host: str
    directory: str  # The run directory that holds the records of all nodes
    taken: int = 0  # Number of the last `Files` that it has received from this node


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong(Record, kind="pong"):
    """The head's clock."""

    sent: int  # As in the `Ping`
    received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered(Record, kind="numbered"):
    """The number of an attempt in the head's run directory."""

    restart: int  # The node's own number
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Record, kind="taken"):
    """The head has written the files of a message."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Record, kind="request"):
    """A request from the head's supervisor to all ranks. The blob is its file's new content."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Record, kind="question"):
    """A question to the node. The blob holds its arguments."""

    number: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndHang(Record, kind="end_hang"):
    """The head has ended its part of a job that hangs (``--kill-on-hang``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Over(Record, kind="over"):
    """The head accepts no more records."""

    killed: bool = False  # Whether its ddpdoctor was killed. Otherwise the job has ended there.


# -- debuggers, in both directions


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Record, kind="held"):
    """Whether a debugger holds ranks: of the node, or, from the head, of any other node."""

    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugRank(Part):
    """A rank to which a debugger can be attached."""

    index: int  # Index of its port on the node
    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugRanks(Record, kind="debug_ranks"):
    """The ranks of the node to which a debugger can be attached."""

    ranks: tuple[DebugRank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOpened(Record, kind="stream_opened"):
    """A debugger on the head has connected to the port of a rank."""

    number: int
    index: int  # As in `DebugRank`


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamData(Record, kind="stream_data"):
    """Bytes of a connection. The blob holds them."""

    number: int
    at: int  # Number of bytes sent before


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTaken(Record, kind="stream_taken"):
    """All bytes up to this position are delivered, so more may be sent."""

    number: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClosed(Record, kind="stream_closed"):
    """A connection is closed. No bytes follow."""

    number: int


ForDebuggers = Held | DebugRanks | StreamOpened | StreamData | StreamTaken | StreamClosed

MESSAGES = kinds_of(__name__)
"""All messages, by kind."""
