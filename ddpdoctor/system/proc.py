"""Read processes from ``/proc``, wait, and make system calls that Python does not offer.

Not psutil: keepers load this module and must start in milliseconds, and preflight's tests provide
their own ``/proc``. psutil is used for rarely read counters (`ddpdoctor.system.process_activity`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# -- Waiting


def pause(seconds: float) -> None:
    """Sleep. Works in processes whose ``time.sleep`` is patched."""
    select.select([], [], [], seconds)


def readable(descriptors: Iterable[int], seconds: float | None) -> list[int]:
    """Wait until a descriptor is readable or at its end, and return those that are.

    Unlike ``select``, this accepts any descriptor number. ``seconds`` None waits forever.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [found for found, _ in poller.poll(None if seconds is None else seconds * 1000)]


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait at most ``seconds`` until a condition holds. Return whether it holds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        pause(0.01)
    return holds


# -- Processes in ``/proc``


PROC = Path("/proc")
ENDED = "ZX"  # State letters of a process that has ended

_TICKS = os.sysconf("SC_CLK_TCK")
_FIELDS = 50
_SHORT = 60
_LISTENS = b"0A"  # The state of a listening socket in ``/proc/net/tcp``


class Stat(NamedTuple):
    """The used fields of ``/proc/PID/stat``."""

    letter: str
    """R runs, S sleeps, D waits for a device or disk, T is stopped, t is held by a tracer, Z has
    ended."""
    parent: int
    group: int
    session: int
    cpu_seconds: float  # User and system
    start: int  # Start in ticks since boot. With the pid it identifies a process.
    core: int  # The core that it ran on last
    status: int  # The wait status, if it has ended


def _read(pid: int | str, name: str, proc: Path = PROC) -> bytes:
    """Read a file of a process or thread. Empty if it cannot be read."""
    try:
        with open(f"{proc}/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def read_stat(pid: int, thread: int | None = None, proc: Path = PROC) -> Stat | None:
    """Return the ``stat`` of a process, or of one of its threads. None if there is none."""
    name = "stat" if thread is None else f"task/{thread}/stat"
    # The second field is the command in brackets, which may contain brackets.
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
    """Return the ``status`` of a process's thread, by default the main one. Empty if none."""
    text = _read(pid, f"task/{pid if thread is None else thread}/status").decode("utf-8", "replace")
    pairs = (line.partition(":") for line in text.split("\n"))
    return {name: value.strip() for name, _, value in pairs}


def core_times(task: str) -> tuple[float, float]:
    """Return the seconds that a thread ran, and was ready to run without a core.

    The kernel adds a wait once it is over.

    Args:
        task: The thread below ``/proc``: ``thread-self``, ``12/task/34``.

    Raises:
        OSError: There is no such thread, or this kernel does not count.
        ValueError: The file has another format.
    """
    with open(f"/proc/{task}/schedstat", "rb") as file:
        ran, waited = (int(word) / 1e9 for word in file.read().split()[:2])
    return ran, waited


def last_ran(pid: int) -> float | None:
    """Return how many seconds ago the main thread of a process was on a core, None if not known.

    ``se.exec_start`` is the kernel's clock at that time. Its current value comes from this thread.
    """

    def clock(task: str) -> float:
        text = re.search(rb"^se\.exec_start +: +([\d.]+)$", _read(task, "sched"), re.MULTILINE)
        return float(text[1]) / 1e3 if text is not None else 0.0

    then, now = clock(f"{pid}/task/{pid}"), clock("thread-self")
    return max(0.0, now - then) if then and now else None


def words(pid: int, proc: Path = PROC) -> list[str]:
    """Return the command line of a process."""
    text = _read(pid, "cmdline", proc).rstrip(b"\0")
    return [word.decode("utf-8", "replace") for word in text.split(b"\0") if word]


def environ(pid: int, proc: Path = PROC) -> dict[str, str]:
    """Return the environment that a process was started with."""
    text = os.fsdecode(_read(pid, "environ", proc))
    pairs = (part.partition("=") for part in text.split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def described(pid: int, proc: Path = PROC) -> str:
    """Describe a process for people: ``python train.py --lr 0.1 (pid 4711)``."""
    found = words(pid, proc)
    if found:
        found = [os.path.basename(found[0]), *found[1:]]
    text = " ".join(" ".join(found).split()) or "a process"
    return f"{text[:_SHORT]}{'...' if len(text) > _SHORT else ''} (pid {pid})"


def children(pid: int) -> set[int]:
    """Return the child processes of a process."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found.update(map(int, _read(pid, f"task/{task}/children").split()))
    return found


def below(roots: Collection[int]) -> set[int]:
    """Return the living descendants of some processes."""
    found: set[int] = set()
    waiting = set(roots)
    while waiting:
        new = children(waiting.pop()) - found
        found |= new
        waiting |= new
    return found


def pids(proc: Path = PROC) -> list[int]:
    """Return the ids of all processes, in no particular order."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(proc) if name.isdigit()]
    return []


def zombie_status(pid: int) -> int | None:
    """Return the exit status of a zombie: 0 to 255, or a negative signal.

    None if it is not a zombie.
    """
    stat = read_stat(pid)
    if stat is None or stat.letter not in ENDED:
        return None
    with contextlib.suppress(ValueError, OverflowError):
        return os.waitstatus_to_exitcode(stat.status)
    return None


def inheritable() -> list[int]:
    """Return the descriptors above 2 that programs executed by this process inherit."""
    numbers: list[int] = []
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            numbers = numbers or [int(name) for name in os.listdir(folder)]
    found = []
    for number in numbers:
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(OSError):
            if number > 2 and os.get_inheritable(number):
                found.append(number)
    return found


def pending(pid: int) -> set[int]:
    """Return the signals that are pending for a process."""
    status = read_status(pid)
    bits = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


def session_of(pid: int) -> int | None:
    """Return the session id of a process, or None if it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


# -- Processes and sockets for checks, whose tests have their own /proc


@dataclass(frozen=True)
class Listed:
    """A process in ``/proc``, as far as this user can see it."""

    pid: int
    folder: Path
    uid: int

    @property
    def words(self) -> list[str]:
        """Its command line. Empty if it cannot be read."""
        return words(self.pid, self.folder.parent)

    @property
    def environ(self) -> dict[str, str]:
        """The environment that it was started with. Empty if it cannot be read."""
        return environ(self.pid, self.folder.parent)

    @property
    def stat(self) -> Stat | None:
        """Its ``stat``. None if it has ended."""
        return read_stat(self.pid, proc=self.folder.parent)

    @property
    def alive(self) -> bool:
        """Whether it runs and is not a zombie."""
        stat = self.stat
        return stat is not None and stat.letter not in ENDED

    @property
    def parent(self) -> int:
        """Its parent's pid. 0 if it has ended."""
        stat = self.stat
        return stat.parent if stat is not None else 0

    @property
    def started(self) -> int:
        """Its start, in ticks since boot. With the pid it identifies a process."""
        stat = self.stat
        return stat.start if stat is not None else 0

    @property
    def began(self) -> int:
        """Its start in Unix nanoseconds."""
        since = time.clock_gettime(time.CLOCK_BOOTTIME) - self.started / _TICKS
        return time.time_ns() - int(since * 1e9)

    @property
    def resident(self) -> int:
        """Its resident bytes of memory."""
        pages = _read(self.pid, "statm", self.folder.parent).split()[1:2]
        return int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0

    @property
    def described(self) -> str:
        """Its description for people: ``python train.py --lr 0.1 (pid 4711)``."""
        return described(self.pid, self.folder.parent)


def named(proc: Path, pid: int) -> Listed | None:
    """Return a process by its pid, or None."""
    folder = proc / str(pid)
    with contextlib.suppress(OSError):
        return Listed(pid, folder, folder.stat().st_uid)
    return None


def listed(proc: Path) -> Iterator[Listed]:
    """Return all processes, in no particular order."""
    return (each for each in (named(proc, pid) for pid in pids(proc)) if each is not None)


class Listener(NamedTuple):
    """A TCP socket that listens."""

    address: str  # Address and port in hexadecimal, as in the kernel's table
    port: int
    uid: int  # Its owner
    inode: int


def listeners(proc: Path = PROC) -> Iterator[Listener]:
    """Yield the listening TCP sockets of this network namespace, IPv4 and IPv6."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for row in (proc / "self" / "net" / table).read_bytes().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTENS:
                    address = fields[1].decode()
                    port = int(address.rpartition(":")[2], 16)
                    yield Listener(address, port, int(fields[7]), int(fields[9]))


def listening(proc: Path) -> dict[int, int]:
    """Return the ports of listening sockets, by inode."""
    return {each.inode: each.port for each in listeners(proc)}


def sockets(process: Path) -> set[int]:
    """Return the inodes of a process's sockets. Empty if they cannot be read."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(process / "fd"):
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(descriptor.path)
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


# -- System calls


_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def become_subreaper() -> None:
    """Make orphaned descendants become children of this process rather than init's."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Request SIGTERM for this process when its parent ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def set_name(name: str) -> None:
    """Set the name of this process in process lists, at most 15 characters."""
    if _libc is not None:
        _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
