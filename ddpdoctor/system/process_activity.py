"""Determine the activity of a process: its state, its CPU time, and its waits for a core."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from ddpdoctor.run.records.supervisor import ChildState, CoreClock, ProcessActivity, ProcessState
from ddpdoctor.system import proc
from ddpdoctor.system.proc import PROC, read_stat

_MAX_COMMAND = 200


class Wait(NamedTuple):
    """The kernel's view of a waiting thread."""

    letter: str
    wchan: str
    """The kernel function in which it sleeps, ``futex`` for all waits for a lock. Empty if not
    known."""


def read_wait(pid: int, thread: int) -> Wait | None:
    """Return the wait of a thread, or None if there is no such thread."""
    stat = read_stat(pid, thread)
    if stat is None:
        return None
    wchan = _wchan(f"/proc/{pid}/task/{thread}/wchan")
    return Wait(stat.letter, "futex" if "futex" in wchan else wchan)


def read_state(pid: int) -> ProcessState:
    """Return the state of a process. The defaults if there is none."""
    stat = read_stat(pid)
    if stat is None:
        return ProcessState()
    children = tuple(
        ChildState(child, each.letter, each.cpu_seconds, " ".join(proc.words(child))[:_MAX_COMMAND])
        for child in sorted(proc.children(pid))
        if (each := read_stat(child)) is not None
    )
    return ProcessState(stat.letter, stat.cpu_seconds, _wchan(f"/proc/{pid}/wchan"), children)


def _wchan(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            name = file.read().strip()
    except OSError:
        return ""
    return "" if name == "0" else name


class CpuTime(NamedTuple):
    """The CPU time of one thread so far."""

    letter: str
    ran: float  # Seconds on a core
    waited: float
    """Seconds ready to run without a core. The kernel adds them once the wait is over."""
    sleeps: int  # Number of voluntary context switches


CpuTimes = Mapping[int, CpuTime]  # The threads of a process by native id


def read_cpu_times(pid: int) -> dict[int, CpuTime]:
    """Return the CPU times of a process's threads. Empty if there is no such process."""
    found: dict[int, CpuTime] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            turn = read_cpu_time(pid, int(thread))
            if turn is not None:
                found[int(thread)] = turn
    return found


def read_cpu_time(pid: int, thread: int) -> CpuTime | None:
    """Return the CPU time of one thread, or None if there is no such thread."""
    status = proc.read_status(pid, thread)
    try:
        letter, sleeps = status["State"][:1], int(status["voluntary_ctxt_switches"])
        ran, waited = proc.core_times(f"{pid}/task/{thread}")
    except (FileNotFoundError, ProcessLookupError):
        # The thread has ended, or this kernel does not count.
        return CpuTime(letter, 0.0, 0.0, sleeps)
    except (OSError, ValueError, KeyError):
        return None
    return CpuTime(letter, ran, waited, sleeps)


def share(before: CpuTime, after: CpuTime, seconds: float) -> float:
    """Return the share of a thread's time on a core, without its waits for a core.

    A thread that gets 3 % of a core and would use all of it counts as busy. A thread that only
    wakes up briefly, but waits long for a core each time, does not.
    """
    if before.letter == after.letter == "R" and before.sleeps == after.sleeps:
        # It has not slept.
        return 1.0
    ran = max(0.0, after.ran - before.ran)
    waited = max(0.0, after.waited - before.waited)
    return min(1.0, ran / max(seconds - waited, ran)) if ran > 0 else 0.0


def lacked(before: CpuTime, after: CpuTime, seconds: float) -> float:
    """Return the seconds that a thread was ready to run but had no core."""
    ran = max(0.0, after.ran - before.ran)
    if before.letter == after.letter == "R" and before.sleeps == after.sleeps:
        # The kernel has not counted the current wait yet.
        return max(0.0, seconds - ran)
    return min(max(0.0, after.waited - before.waited), seconds)


def most_lacked(before: CpuTimes, after: CpuTimes, seconds: float) -> float:
    """Return the maximum seconds that a thread of both samples was ready to run without a core."""
    both = before.keys() & after.keys()
    return max((lacked(before[each], after[each], seconds) for each in both), default=0.0)


def busy(before: CpuTimes, after: CpuTimes, seconds: float) -> float:
    """Return the sum of the shares of a process's threads."""
    new = CpuTime("", 0.0, 0.0, 0)
    return sum(share(before.get(thread, new), turn, seconds) for thread, turn in after.items())


def is_foreign(pid: int) -> bool:
    """Return whether a process belongs to another user."""
    try:
        return os.stat(f"/proc/{pid}").st_uid != os.geteuid()
    except OSError:
        return False


class Signals(NamedTuple):
    """The signals of a thread as bit masks. Signal N is bit N - 1."""

    pending: int
    blocked: int
    caught: int  # Signals that the process handles


def read_signals(pid: int, thread: int) -> Signals | None:
    """Return a thread's signals, or None if they cannot be read."""
    status = proc.read_status(pid, thread)
    try:
        pending, blocked, caught = (int(status[f"Sig{each}"], 16) for each in ("Pnd", "Blk", "Cgt"))
    except (KeyError, ValueError):
        return None
    return Signals(pending, blocked, caught)


def is_open(pid: int, descriptor: int, path: str) -> bool:
    """Return whether a process has the file at ``path`` open as that descriptor."""
    try:
        there, here = os.stat(f"/proc/{pid}/fd/{descriptor}"), os.stat(path)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


# -- Activity between two samples


BUSY = 0.2  # Minimum share of a core, without waits for a core, of a process that works


@dataclass(frozen=True)
class Sample:
    """The kernel's counters of one process."""

    letter: str  # Its state as in ``/proc/PID/stat``. Empty if there is no such process.
    cpu: float = 0.0  # CPU seconds, user and system
    children_cpu: float = 0.0  # CPU seconds of its living descendants
    characters: int = 0  # Bytes passed through ``read`` and ``write``, including its descendants'
    written: int = 0  # The part of them that the process itself wrote
    disk: int = 0  # Bytes that devices moved for it and its descendants
    input: bool = False  # It waits in ``read`` on its standard input
    terminal: bool = False  # Its standard input is a terminal
    network: bool = False  # It waits for a socket
    children_network: bool = False  # A descendant waits for a socket
    switches: int = 0  # Voluntary context switches of its main thread
    turns: CpuTimes = field(default_factory=dict)  # CPU times of its threads
    children_turns: Mapping[int, CpuTimes] = field(default_factory=dict)
    """CPU times of its living descendants' threads, by pid."""


def sample(pid: int) -> Sample:
    """Sample a process."""
    stat = proc.read_stat(pid)
    if stat is None:
        return Sample("")
    below = proc.below({pid})
    moved = [_moved(each) for each in (pid, *below)]
    call, first = _system_call(pid)
    reads_input = call == "read" and first == 0
    return Sample(
        stat.letter,
        stat.cpu_seconds,
        sum(each.cpu_seconds for each in map(proc.read_stat, below) if each is not None),
        sum(characters + written for characters, written, *_ in moved),
        moved[0][1],
        sum(disk for _, _, disk, _ in moved),
        input=reads_input,
        terminal=reads_input and _leads_to(pid, 0, ("/dev/pts/", "/dev/tty")),
        network=call == "poll" or _at_socket(pid, call, first),
        children_network=any(_at_socket(child, *_system_call(child)) for child in below),
        switches=moved[0][3],
        turns=read_cpu_times(pid),
        children_turns={child: read_cpu_times(child) for child in below},
    )


def compared(before: Sample, after: Sample, seconds: float) -> ProcessActivity:
    """Compare two samples of a process that were taken some seconds apart."""
    children = {
        child: (before.children_turns.get(child, {}), turns)
        for child, turns in after.children_turns.items()
    }
    return ProcessActivity(
        seconds=round(seconds, 2),
        letters=before.letter + after.letter,
        busy=round(busy(before.turns, after.turns, seconds), 3),
        children_busy=round(sum((busy(*each, seconds) for each in children.values()), 0.0), 3),
        children_letters="".join(
            turns[child].letter for child, (_, turns) in children.items() if child in turns
        ),
        cpu=round(max(0.0, after.cpu - before.cpu) / seconds, 3),
        ran=round(after.cpu, 2),
        children_cpu=round(max(0.0, after.children_cpu - before.children_cpu) / seconds, 3),
        characters=max(0, after.characters - before.characters),
        disk=max(0, after.disk - before.disk),
        input=before.input and after.input,
        terminal=before.terminal and after.terminal,
        network=before.network or after.network,
        children_network=before.children_network or after.children_network,
        switches=max(0, after.switches - before.switches),
    )


def main_cpu(before: Sample, after: Sample, pid: int) -> tuple[float, float]:
    """Return the seconds that the main threads of a process and its descendants ran."""

    def ran(pid: int, known: CpuTimes, turns: CpuTimes) -> float:
        return turns[pid].ran - known[pid].ran if pid in turns and pid in known else 0.0

    children = (
        ran(child, before.children_turns.get(child, {}), turns)
        for child, turns in after.children_turns.items()
    )
    return ran(pid, before.turns, after.turns), sum(children)


def cpu_times_of_tree(pid: int) -> dict[int, CpuTimes]:
    """Return the CPU times of a process and its descendants, by pid."""
    return {each: read_cpu_times(each) for each in (pid, *proc.below({pid}))}


def works(before: CpuTimes, after: CpuTimes, seconds: float) -> bool:
    """Return whether a process computes, or would if it had a core."""
    return busy(before, after, seconds) >= BUSY or any(
        turn.letter == "R" and before.get(thread, turn).letter == "R"
        for thread, turn in after.items()
    )


def cores_of_tree(
    before: Mapping[int, CpuTimes], after: Mapping[int, CpuTimes], seconds: float
) -> float:
    """Return the number of cores that processes used, excluding waits for a core."""
    return sum(busy(before.get(pid, {}), turns, seconds) for pid, turns in after.items())


def _moved(pid: int) -> tuple[int, int, int, int]:
    """Return bytes read, written and moved by devices, and voluntary context switches."""
    try:
        process = psutil.Process(pid)
        switches = int(process.num_ctx_switches().voluntary)
    except psutil.Error:
        return 0, 0, 0, 0
    try:
        moved = process.io_counters()
    except psutil.Error:
        # The process belongs to another user.
        return 0, 0, 0, switches
    disk = moved.read_bytes + moved.write_bytes
    return moved.read_chars, moved.write_chars, disk, switches


_CALLS = {
    "x86_64": {
        "read": (0, 1, 19, 20),
        "socket": (42, 43, 44, 45, 46, 47),
        "poll": (7, 23, 232, 270, 271, 281),
    },
    "aarch64": {
        "read": (63, 64, 65, 66),
        "socket": (202, 203, 206, 207, 211, 212),
        "poll": (22, 72, 73),
    },
}
"""Numbers of system calls: ``read`` and ``write``, ``connect`` and ``recvfrom``, ``poll``."""


def _system_call(pid: int) -> tuple[str, int]:
    """Return the kind of call in which the main thread waits, and its first argument.

    The kind is empty if it is not known.
    """
    try:
        with open(f"/proc/{pid}/syscall") as file:
            words = file.read().split()
        number, first = int(words[0]), int(words[1], 16)
    except (OSError, ValueError, IndexError):
        return "", 0
    kinds = _CALLS.get(os.uname().machine, {})
    return next((kind for kind, numbers in kinds.items() if number in numbers), ""), first


def _at_socket(pid: int, call: str, first: int) -> bool:
    """Return whether a system call is about a socket."""
    return call in ("read", "socket") and _leads_to(pid, first, ("socket:",))


def _leads_to(pid: int, descriptor: int, kinds: tuple[str, ...]) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(kinds)
    except OSError:
        return False


# -- Clocks of CPU cores, by the kernel's ``cpufreq``


MAX_CLOCKS = 16  # Maximum number of ranks whose cores are read


class CoreClocks:
    """The highest measured clock of each rank's core.

    An idle core may run slowly. A busy one does so only if it cannot run faster. Many virtual
    machines report no frequencies.
    """

    def __init__(
        self, processes: Path = PROC, cores: Path = Path("/sys/devices/system/cpu")
    ) -> None:
        self._processes, self._cores = processes, cores
        self._seen: dict[int, CoreClock] = {}

    def look(self, pids: Mapping[int, int]) -> None:
        """Read the clock of the core that each rank is on. ``pids`` is by rank."""
        for rank, pid in list(pids.items())[:MAX_CLOCKS]:
            with contextlib.suppress(OSError, ValueError):
                stat = read_stat(pid, proc=self._processes)
                if stat is None:
                    continue
                folder = self._cores / f"cpu{stat.core}" / "cpufreq"
                clock = int((folder / "scaling_cur_freq").read_bytes())
                most = int((folder / "cpuinfo_max_freq").read_bytes())
                seen = self._seen.get(rank, CoreClock(rank, 0, 0, 0))
                self._seen[rank] = CoreClock(
                    rank, max(clock, seen.clock), max(most, seen.most), seen.readings + 1
                )

    @property
    def highest(self) -> tuple[CoreClock, ...]:
        """The measured clocks by rank. Empty if not known."""
        return tuple(self._seen[rank] for rank in sorted(self._seen))
