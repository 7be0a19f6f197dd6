"""Records of a rank's memory: its size, the objects that hold it, and its state when it ran out.

Sizes are bytes, times Unix nanoseconds.
"""

from __future__ import annotations

from typing import NamedTuple

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import CodeFrame, Part, Record, dataclass


class MemoryPoint(NamedTuple):
    """The memory of a rank at the end of a step. In JSON a list."""

    step: int
    time: int
    host: int
    """Private memory of the process. It rises at most as much as its virtual memory. Pages of an
    older buffer that are touched one after the other do not count."""
    allocated: int | None = None
    """Bytes that torch's CUDA allocator has given out. None without a GPU."""
    reserved: int | None = None


class WorkerMemory(NamedTuple):
    """The memory of one of a rank's child processes. In JSON a list."""

    pid: int
    own: int  # Its anonymous memory, including pages that it shares with its parent
    children: int  # Number of child processes of the rank
    private: int | None = None
    """Pages that it shares with no other process. Read only if its data set may be copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord(Record, kind="memory", kept=1024):
    """The memory of a rank in some steps. Points get rarer as the rank gets older."""

    time: int
    points: tuple[MemoryPoint, ...] = ()
    available: int | None = None  # Free memory of the machine, or of the cgroup if that is less
    total: int | None = None  # Memory of the rank's GPU
    worker: WorkerMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRecord(Record, kind="dataset_memory", kept=8):
    """A large Python container in a data set that is read by worker processes."""

    type: str  # The class of the data set
    name: str  # The attribute
    holds: str  # The class of the container, and that of its elements
    size: int  # Number of its elements
    path: str = ""  # File of the class
    line: int = 0  # Line of its ``__getitem__``


class Holder(NamedTuple):
    """An object that grew between two samples of a rank's objects. In JSON a list."""

    name: str  # Its name in the code: ``hist``, ``self.cache``, ``model.module.seen``
    sort: str
    """``list``, ``dict`` or the like, ``hooks``, ``cache``, ``graph`` for a tensor whose graph has
    grown, or ``tensor``, ``array`` or ``text`` for a value that has grown."""
    at: CodeFrame  # The frame or module through which it was found
    size: int  # Elements, operations or bytes now
    grew: int  # The increase since the first sample
    holds: str = ""  # The class of its newest element: ``Tensor``
    each: int | None = None  # Bytes of an element. None if not known, as of a graph.
    graph: bool = False  # Its newest element is a tensor with a graph
    bound: int | None = None  # Maximum number of its elements, if it has one


class Allocated(NamedTuple):
    """GPU memory that a line allocated in some steps and that was not freed. In JSON a list."""

    line: Location
    size: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldersRecord(Record, kind="holders", kept=64):
    """Objects that grew on a rank whose memory grows, according to several samples."""

    time: int
    first: int  # Step of the first sample
    step: int  # Step of the newest sample
    looks: int  # Number of samples in which all of ``found`` grew
    complete: bool = True  # All reachable objects were examined
    found: tuple[Holder, ...] = ()
    allocated: tuple[Allocated, ...] = ()  # Largest first. Empty without a GPU.
    cost: int = 0  # Nanoseconds that the samples took


class Block(NamedTuple):
    """Blocks of one size on a GPU. In JSON a list."""

    size: int
    times: int
    line: Location | None = None  # Where they were allocated, if torch recorded it


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorFacts(Part):
    """The state of torch's CUDA allocator. Unknown values are None."""

    allocated: int
    reserved: int
    peak: int = 0
    total: int | None = None  # Memory of the GPU
    largest_free: int | None = None  # Largest free block within the reserved memory
    expandable: bool = False  # Segments are expandable
    blocks: tuple[Block, ...] = ()  # Those that use the most memory in total


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryRecord(Record, kind="out_of_memory"):
    """The memory of a rank's GPU when an exception reported that it ran out."""

    time: int
    step: int
    gpu: AllocatorFacts | None = None
    shape: tuple[int, ...] = ()  # Shape of the largest tensor in the last batch
    largest: tuple[int, ...] = ()  # The largest such shape in earlier batches
    file: str = ""  # Snapshot for pytorch.org/memory_viz in the run directory
