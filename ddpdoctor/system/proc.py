"""Read what Linux knows of processes, without waiting for anything."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# -- waiting that works with any clock and any number of a descriptor


def pause(seconds: float) -> None:
    """Let time pass."""
    select.select([], [], [], seconds)


def readable(descriptors: Iterable[int], seconds: float | None) -> list[int]:
    """Wait until one of some descriptors is readable, or at its end.

    Args:
        descriptors: Which.
        seconds: How long at most; None for as long as it takes.

    Returns:
        Those that are.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [found for found, _ in poller.poll(None if seconds is None else seconds * 1000)]


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, for so long at most. Returns whether it holds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        pause(0.01)
    return holds


# -- what Linux knows of processes: the one layer over ``/proc``, which waits for nothing


PROC = Path("/proc")
ENDED = "ZX"
"""Letters of a process that has ended."""

_TICKS = os.sysconf("SC_CLK_TCK")
_FIELDS = 50
_SHORT = 60
_LISTENS = b"0A"
"""The state of a listening socket in ``/proc/net/tcp``."""


class Stat(NamedTuple):
    """What is used of ``/proc/PID/stat``."""

    letter: str
    """R runs, S sleeps, D waits for a device or disk, T is stopped, t is held by a tracer, Z has
    ended."""
    parent: int
    group: int
    session: int
    cpu_seconds: float
    """User and system."""
    start: int
    """Ticks since boot at which the process started; with the pid it identifies a process."""
    core: int
    """The core that it ran on last."""
    status: int
    """Of one that has ended, as ``wait`` gives it."""


def _read(pid: int, name: str, proc: Path = PROC) -> bytes:
    """A file of a process; empty if it may not be read.

    With :func:`open`, as a whole, at one moment.
    """
    try:
        with open(f"{proc}/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def read_stat(pid: int, thread: int | None = None, proc: Path = PROC) -> Stat | None:
    """The ``stat`` of a process, or of one of its threads; None if there is none."""
    name = "stat" if thread is None else f"task/{thread}/stat"
    # The command comes second, in brackets, and may itself have some.
    fields = _read(pid, name, proc).rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    fields += [b"0"] * (_FIELDS - len(fields))
    try:
        numbers = [int(field) for field in fields[1:]]
    except ValueError:
        return None
    return Stat(
        fields[0].decode("ascii", "replace"),
        numbers[0],
        numbers[1],
        numbers[2],
        (numbers[10] + numbers[11]) / _TICKS,
        numbers[18],
        numbers[35],
        numbers[-1],
    )


def read_status(pid: int, thread: int | None = None) -> dict[str, str]:
    """The lines of ``status`` of a process's thread, by default the main one; empty if none."""
    text = _read(pid, f"task/{pid if thread is None else thread}/status").decode("utf-8", "replace")
    pairs = (line.partition(":") for line in text.split("\n"))
    return {name: value.strip() for name, _, value in pairs}


def words(pid: int, proc: Path = PROC) -> list[str]:
    """The command line of a process."""
    text = _read(pid, "cmdline", proc).rstrip(b"\0")
    return [word.decode("utf-8", "replace") for word in text.split(b"\0") if word]


def environ(pid: int, proc: Path = PROC) -> dict[str, str]:
    """The environment that a process was started with."""
    text = os.fsdecode(_read(pid, "environ", proc))
    pairs = (part.partition("=") for part in text.split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def described(pid: int, proc: Path = PROC) -> str:
    """A process for a person: ``python train.py --lr 0.1 (pid 4711)``."""
    found = words(pid, proc)
    if found:
        found = [os.path.basename(found[0]), *found[1:]]
    text = " ".join(" ".join(found).split()) or "a process"
    return f"{text[:_SHORT]}{'...' if len(text) > _SHORT else ''} (pid {pid})"


def children(pid: int) -> set[int]:
    """The child processes of a process now."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found.update(map(int, _read(pid, f"task/{task}/children").split()))
    return found


def below(roots: Collection[int]) -> set[int]:
    """The living descendants of some processes."""
    found: set[int] = set()
    waiting = set(roots)
    while waiting:
        new = children(waiting.pop()) - found
        found |= new
        waiting |= new
    return found


def pids(proc: Path = PROC) -> list[int]:
    """All processes, in no order."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(proc) if name.isdigit()]
    return []


def zombie_status(pid: int) -> int | None:
    """The exit status of a process that has ended and whose parent has not asked yet.

    Returns:
        0 to 255, a negative signal number, or None if there is no such zombie to be seen.
    """
    stat = read_stat(pid)
    if stat is None or stat.letter not in ENDED:
        return None
    with contextlib.suppress(ValueError, OverflowError):
        return os.waitstatus_to_exitcode(stat.status)
    return None


def inheritable() -> list[int]:
    """The descriptors above 2 of this process that programs which it executes get."""
    numbers: list[int] = []
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            numbers = numbers or [int(name) for name in os.listdir(folder)]
    found = []
    for number in numbers:
        # That of the list itself is closed by now.
        with contextlib.suppress(OSError):
            if number > 2 and os.get_inheritable(number):
                found.append(number)
    return found


def pending(pid: int) -> set[int]:
    """The signals that were sent to a process, which blocks them."""
    status = read_status(pid)
    bits = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


def session_of(pid: int) -> int | None:
    """The session id of a process, None if it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


# -- for checks, whose tests have their own /proc


@dataclass(frozen=True)
class Listed:
    """A process as ``/proc`` shows it to this user."""

    pid: int
    folder: Path
    uid: int

    @property
    def words(self) -> list[str]:
        """Its command line; empty if it may not be seen, or there is none."""
        return words(self.pid, self.folder.parent)

    @property
    def environ(self) -> dict[str, str]:
        """The environment it was started with; empty if this user may not see it."""
        return environ(self.pid, self.folder.parent)

    @property
    def stat(self) -> Stat | None:
        """Its state; None if it has ended."""
        return read_stat(self.pid, proc=self.folder.parent)

    @property
    def alive(self) -> bool:
        """Whether it still runs, and is no zombie."""
        stat = self.stat
        return stat is not None and stat.letter not in ENDED

    @property
    def parent(self) -> int:
        """Its parent's pid; 0 if it has ended."""
        stat = self.stat
        return stat.parent if stat is not None else 0

    @property
    def started(self) -> int:
        """When it started, in clock ticks since the boot; with the pid it names it for ever."""
        stat = self.stat
        return stat.start if stat is not None else 0

    @property
    def resident(self) -> int:
        """Bytes of memory that it holds."""
        pages = _read(self.pid, "statm", self.folder.parent).split()[1:2]
        return int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0

    @property
    def described(self) -> str:
        """For a person: ``python train.py --lr 0.1 (pid 4711)``."""
        return described(self.pid, self.folder.parent)


def named(proc: Path, pid: int) -> Listed | None:
    """A process by its pid; None if there is none."""
    folder = proc / str(pid)
    with contextlib.suppress(OSError):
        return Listed(pid, folder, folder.stat().st_uid)
    return None


def listed(proc: Path) -> Iterator[Listed]:
    """All processes, in no order."""
    return (each for each in (named(proc, pid) for pid in pids(proc)) if each is not None)


class Listener(NamedTuple):
    """A TCP socket that listens."""

    address: str
    """Where it listens, as the kernel's table has it: address and port in hexadecimal."""
    port: int
    uid: int
    """Whose it is."""
    inode: int


def listeners(proc: Path = PROC) -> Iterator[Listener]:
    """The TCP sockets of this network namespace that listen, IPv4 and IPv6."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for row in (proc / "self" / "net" / table).read_bytes().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTENS:
                    address = fields[1].decode()
                    port = int(address.rpartition(":")[2], 16)
                    yield Listener(address, port, int(fields[7]), int(fields[9]))


def listening(proc: Path) -> dict[int, int]:
    """The ports on which something listens, by the inode of the socket."""
    return {each.inode: each.port for each in listeners(proc)}


def sockets(process: Path) -> set[int]:
    """The inodes of the sockets that a process holds; empty if this user may not see them."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(process / "fd"):
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(descriptor.path)
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


# -- system calls that Python has no name for


_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def become_subreaper() -> None:
    """From now on, orphans below this process become its children rather than init's."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """From now on this process gets SIGTERM when its parent ends, however that ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def set_name(name: str) -> None:
    """How this process is called in lists, and by `killall`: at most 15 letters."""
    if _libc is not None:
        _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
