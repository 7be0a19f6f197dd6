"""Evidence about the ranks of a job that makes no progress: stacks, activity, collectives.

An examination (`ddpdoctor.nodes.hang_examination`) makes one `RankEvidence` for each rank. They
are the ``ranks`` of a `HangRecord`, and the rules for hangs read them back.
"""

from __future__ import annotations

from dataclasses import dataclass as positional
from dataclasses import field
from typing import NamedTuple

from ddpdoctor.run.records.base import Part, dataclass
from ddpdoctor.run.ring import Collective

# -- stacks and process states


class Frame(NamedTuple):
    """One frame of Python code."""

    path: str
    """The file, absolute where that is known; ``<string>`` and the like for code without one."""
    line: int  # 0 if it is not known
    function: str


@positional(frozen=True)
class Thread(Part):
    """The stack of one thread."""

    ident: int  # ``threading.get_ident()`` of the thread; 0 if it is not known
    name: str  # Its name, empty if it is not known
    current: bool
    """Whether ``faulthandler`` said that this thread wrote the stacks; False in all others."""
    frames: tuple[Frame, ...]  # Outermost first
    awaited: bool = False
    """Whether the interpreter is known to wait for it at the end: it is no daemon."""


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
    disk, T is stopped, t is held by a tracer, Z has ended; empty if there is no such process."""
    cpu_seconds: float = 0.0  # CPU time of the process so far, user and system
    wchan: str = ""
    """The function of the kernel that the main thread sleeps in; empty if that is unknown."""
    children: tuple[ChildState, ...] = ()  # Its child processes, ascending by pid


MAIN = "MainThread"  # The name of a process's main thread, as ``threading`` has it


@positional(frozen=True)
class RankStacks(Part):
    """The stacks of one rank, or why there are none."""

    rank: int
    restart: int
    pid: int  # 0 if it is not known
    host: str
    threads: tuple[Thread, ...] = ()  # The main thread first, if it is known
    native: tuple[str, ...] = ()
    """Native frames of the main thread below its innermost Python frame, outermost first, from
    py-spy; empty if it was not asked for or could not be had."""
    state: ProcessState = field(default_factory=ProcessState)
    gil_held: bool = False
    """Whether native code held the GIL for so long that no Python could run in the rank."""
    trouble: str = ""
    """Why there are no stacks, in a few words: ``stopped (SIGSTOP)``. Empty where there are."""
    note: str = ""
    """What is missing although there are stacks, in a few words: why there are no native frames."""
    world_size: int = 0
    """The argument of the ``init_process_group`` that it is in; 0 if it is in none, or unknown."""

    @property
    def main(self) -> Thread | None:
        """The main thread, which is the one that trains."""
        return next((thread for thread in self.threads if thread.name == MAIN), None)


# -- what processes, GPUs and Flight Recorders showed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessActivity(Part):
    """What a process did between two samples, about a second apart."""

    seconds: float = 0.0
    letters: str = ""
    """Its state at the first and at the second sample, as :attr:`ProcessState.letter`."""
    busy: float = 0.0  # Cores that it used, of the time in which it was not kept from running
    children_busy: float = 0.0
    children_letters: str = ""  # The newest state of each child process
    cpu: float = 0.0  # Cores that it used
    ran: float = 0.0  # Seconds of CPU time since the process began
    children_cpu: float = 0.0
    characters: int = 0  # Bytes that went through ``read`` and ``write``, its children's included
    disk: int = 0  # Bytes that devices moved for it and its children
    input: bool = False  # It slept in ``read`` on its standard input
    terminal: bool = False  # That input is a terminal
    network: bool = False  # It waited for a socket
    children_network: bool = False
    switches: int = 0  # How often its main thread waited for something that came
    since_cpu: float | None = None
    """Cores used by its main thread since the examination before; None if that is not known."""
    since_children_cpu: float | None = None
    """Cores used by the main threads of its children since then."""
    wrote: int = 0  # Bytes that it wrote since the examination, in which it was asked for nothing


class GpuMark(NamedTuple):
    """A marker of the probe in a GPU's stream; in JSON a list."""

    phase: str  # The phase that it ends
    queued: int  # When the host queued it, in Unix nanoseconds
    passed: bool  # The GPU has passed it


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightCall(Part):
    """One collective in a Flight Recorder of torch."""

    id: int = 0  # Its place among all that were recorded
    group: str = ""  # Name of the process group; ``0`` is the default group
    members: str = ""  # Ranks of the group, ``0-3``; empty if they are not known
    sequence: int = 0  # Its number in the group, counted for each backend
    point_to_point: bool = False  # It is a send or a receive
    backend: str = ""
    name: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()  # Of its input tensors
    dtypes: tuple[str, ...] = ()
    created: int = 0  # Unix nanoseconds
    retired: bool = False
    state: str = ""  # ``scheduled``, ``started`` or ``completed``; empty with gloo
    duration: float | None = None
    """Milliseconds on the GPU; known only where the starts of collectives are recorded."""
    lines: tuple[str, ...] = ()  # The user's lines that led to it, ``path:line``, innermost first

    @property
    def done(self) -> bool:
        """Whether it has completed."""
        return self.retired or self.state == "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightAnswer(Part):
    """The file by which a rank answers an examination."""

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
    """What an examination, or a dump of a Flight Recorder, shows of one rank."""

    rank: int = -1
    restart: int = 0
    pid: int = 0
    host: str = ""
    backend: str = ""
    world_size: int = 0
    exit: ProcessExit | None = None  # The end of its process, if that was seen
    ended: bool = False  # Its script has come to its regular end
    phase: str | None = None
    """The phase on its status page; None if it has not joined a process group."""
    since: int = 0  # When it entered that phase, in Unix nanoseconds
    step: int = 0  # Steps closed
    armed: int = 0  # Forwards whose backward was to be all-reduced
    reduced: int = 0  # Backwards that were all-reduced
    collective: str = ""  # The collective on its status page
    site: str = ""  # The line on its status page, ``path:line``
    sites: dict[str, str] = field(default_factory=dict)
    """The lines at which it entered phases, by phase."""
    silent: int | None = None  # Nanoseconds since its writing thread was awake
    waited: int = 0  # The order of the asynchronous collective that it waits for; 0 if none
    collectives: tuple[Collective, ...] = ()
    """Its newest collectives called from Python, oldest first."""
    flight: tuple[FlightCall, ...] | None = None
    """Its newest collectives by its Flight Recorder; None if that did not answer."""
    flight_trouble: str = ""
    device: tuple[GpuMark, ...] = ()  # The probe's newest markers in the stream of its GPU
    sends: bool = False  # A send or a receive is not done
    stacks: RankStacks | None = None
    later: RankStacks | None = None  # Its stacks a second later, if it did not wait in a collective
    workers: tuple[tuple[RankStacks, ...], ...] = ()
    """The stacks of each worker of its DataLoader, at two moments."""
    activity: ProcessActivity | None = None  # None if its process could not be watched
    launcher_works: bool = False  # The job's launcher was at work
    lost: float = 0.0  # Seconds of its silence in which it, or a child process of it, had no core
    steady: int = 0  # Examinations in a row that saw the rank do the same
    steadied: float = 0.0  # Seconds that it had been silent, with a core, at the last of them
    dump: str = ""
    """The Flight Recorder file that this was read from; empty for a rank that was examined."""
    forgets: bool = False  # That file lacks older collectives
    timeout: int = 0
    """Nanoseconds after which the collective that it waits for times out, by that file."""
