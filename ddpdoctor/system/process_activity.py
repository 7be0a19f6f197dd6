"""Tell what a process does: its state, and the time it gets on the cores and waits for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from ddpdoctor.run.records.evidence import ChildState as ChildState
from ddpdoctor.run.records.evidence import ProcessActivity
from ddpdoctor.run.records.evidence import ProcessState as ProcessState
from ddpdoctor.run.records.supervisor import CoreClock
from ddpdoctor.system import proc
from ddpdoctor.system.proc import ENDED, PROC, read_stat

# -- process state


__all__ = ["ENDED", "read_stat"]

_MOST_COMMAND = 200


class Wait(NamedTuple):
    """What a thread does, as the kernel sees it."""

    letter: str
    wchan: str
    """The function of the kernel that it sleeps in: ``futex`` for any of the several that wait for
    a lock; empty if that is unknown."""


def read_wait(pid: int, thread: int) -> Wait | None:
    """What one thread of a process does, None if there is no such thread."""
    stat = read_stat(pid, thread)
    if stat is None:
        return None
    wchan = _wchan(f"/proc/{pid}/task/{thread}/wchan")
    return Wait(stat.letter, "futex" if "futex" in wchan else wchan)


def read_state(pid: int) -> ProcessState:
    """The state of a process; :class:`ProcessState`'s defaults if there is none."""
    stat = read_stat(pid)
    if stat is None:
        return ProcessState()
    children = tuple(
        ChildState(
            child, each.letter, each.cpu_seconds, " ".join(proc.words(child))[:_MOST_COMMAND]
        )
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


class Turn(NamedTuple):
    """What one thread has had of the cores so far."""

    letter: str
    ran: float
    """Seconds on a core."""
    waited: float
    """Seconds ready to run, without a core; the kernel adds them once the wait is over."""
    sleeps: int
    """How often it went to sleep by itself."""


Turns = Mapping[int, Turn]
"""The threads of a process, by their native ids."""


def read_turns(pid: int) -> dict[int, Turn]:
    """What each thread of a process has had of the cores; empty if there is no such process."""
    found: dict[int, Turn] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            turn = read_turn(pid, int(thread))
            if turn is not None:
                found[int(thread)] = turn
    return found


def read_turn(pid: int, thread: int) -> Turn | None:
    """What one thread has had of the cores, None if there is no such thread."""
    status = proc.read_status(pid, thread)
    try:
        letter, sleeps = status["State"][:1], int(status["voluntary_ctxt_switches"])
        with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
            ran, waited = (int(word) / 1e9 for word in file.read().split()[:2])
    except (FileNotFoundError, ProcessLookupError):
        # The thread has ended; or this kernel does not count.
        return Turn(letter, 0.0, 0.0, sleeps)
    except (OSError, ValueError, KeyError):
        return None
    return Turn(letter, ran, waited, sleeps)


def share(before: Turn, after: Turn, seconds: float) -> float:
    """For which part of the time that a thread had a core, or needed none, it used one.

    A thread that gets 3 % of a core and would take all of it counts as busy; one that waits long
    for a core, whenever it wakes up to see that there is nothing to do, does not.
    """
    if before.letter == after.letter == "R" and before.sleeps == after.sleeps:
        # It has not slept in between.
        return 1.0
    ran = max(0.0, after.ran - before.ran)
    waited = max(0.0, after.waited - before.waited)
    return min(1.0, ran / max(seconds - waited, ran)) if ran > 0 else 0.0


def lacked(before: Turn, after: Turn, seconds: float) -> float:
    """For how many seconds a thread was ready to run and had no core."""
    ran = max(0.0, after.ran - before.ran)
    if before.letter == after.letter == "R" and before.sleeps == after.sleeps:
        # The kernel has not counted the wait that is under way.
        return max(0.0, seconds - ran)
    return min(max(0.0, after.waited - before.waited), seconds)


def busy(before: Turns, after: Turns, seconds: float) -> float:
    """The shares of all threads of a process together."""
    new = Turn("", 0.0, 0.0, 0)
    return sum(share(before.get(thread, new), turn, seconds) for thread, turn in after.items())


def is_foreign(pid: int) -> bool:
    """Whether a process belongs to another user."""
    try:
        return os.stat(f"/proc/{pid}").st_uid != os.geteuid()
    except OSError:
        return False


class Signals(NamedTuple):
    """The signals of a thread, as bit masks: signal N is bit N - 1."""

    pending: int
    blocked: int
    caught: int
    """By the whole process."""


def read_signals(pid: int, thread: int) -> Signals | None:
    """What a thread does with signals, None if there is no such thread or one may not know."""
    status = proc.read_status(pid, thread)
    try:
        pending, blocked, caught = (int(status[f"Sig{each}"], 16) for each in ("Pnd", "Blk", "Cgt"))
    except (KeyError, ValueError):
        return None
    return Signals(pending, blocked, caught)


def is_open(pid: int, descriptor: int, path: str) -> bool:
    """Whether a process has the file at ``path`` open under that number."""
    try:
        there, here = os.stat(f"/proc/{pid}/fd/{descriptor}"), os.stat(path)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


# -- activity


BUSY = 0.2
"""Cores that a process uses at least, of those that it gets, if it is at work."""


@dataclass(frozen=True)
class Sample:
    """The kernel's counters of one process at one moment."""

    letter: str
    """Its state as in ``/proc/PID/stat``, empty if there is no such process."""
    cpu: float = 0.0
    """Seconds, user and system."""
    children_cpu: float = 0.0
    """Seconds of its living children and theirs."""
    characters: int = 0
    """Bytes that went through ``read`` and ``write``: files, pipes, terminals; its children's,
    too."""
    written: int = 0
    """Those of them that it, and no child, wrote."""
    disk: int = 0
    """Bytes that devices moved for it and its children."""
    input: bool = False
    """It sleeps in ``read`` on its standard input."""
    terminal: bool = False
    """And that is a terminal, at which somebody may sit."""
    network: bool = False
    """It waits for a socket."""
    children_network: bool = False
    """One of those below it does."""
    switches: int = 0
    """How often its main thread waited for something that came."""
    turns: Turns = field(default_factory=dict)
    """What its threads have had of the cores."""
    children_turns: Mapping[int, Turns] = field(default_factory=dict)
    """The same of its living children and theirs, by pid."""


def sample(pid: int) -> Sample:
    """Look at a process."""
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
        sum(characters + written for characters, written, _ in moved),
        moved[0][1],
        sum(disk for _, _, disk in moved),
        input=reads_input,
        terminal=reads_input and _leads_to(pid, 0, ("/dev/pts/", "/dev/tty")),
        network=call == "poll" or _at_socket(pid, call, first),
        children_network=any(_at_socket(child, *_system_call(child)) for child in below),
        switches=_switches(pid),
        turns=read_turns(pid),
        children_turns={child: read_turns(child) for child in below},
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
    """Seconds that the main threads of a process and of its children ran between two samples."""

    def ran(pid: int, known: Turns, turns: Turns) -> float:
        return turns[pid].ran - known[pid].ran if pid in turns and pid in known else 0.0

    children = (
        ran(child, before.children_turns.get(child, {}), turns)
        for child, turns in after.children_turns.items()
    )
    return ran(pid, before.turns, after.turns), sum(children)


def turns_of_tree(pid: int) -> dict[int, Turns]:
    """What a process and all below it have had of the cores, by pid."""
    return {each: read_turns(each) for each in (pid, *proc.below({pid}))}


def works(before: Turns, after: Turns, seconds: float) -> bool:
    """Whether a process computes, or would if it had a core."""
    return busy(before, after, seconds) >= BUSY or any(
        turn.letter == "R" and before.get(thread, turn).letter == "R"
        for thread, turn in after.items()
    )


def cores_of_tree(before: Mapping[int, Turns], after: Mapping[int, Turns], seconds: float) -> float:
    """How many cores processes used, of those that they got."""
    return sum(busy(before.get(pid, {}), turns, seconds) for pid, turns in after.items())


def _moved(pid: int) -> tuple[int, int, int]:
    """Bytes that a process has read, has written, and that devices have moved for it."""
    try:
        moved = psutil.Process(pid).io_counters()
    except psutil.Error:
        return 0, 0, 0
    return moved.read_chars, moved.write_chars, moved.read_bytes + moved.write_bytes


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
"""Numbers of system calls: ``read``, ``write``; ``connect``, ``recvfrom``; ``poll``, ``select``."""


def _system_call(pid: int) -> tuple[str, int]:
    """The kind of call that the main thread waits in, and its first argument.

    The kind is empty if it is another one, or it is unknown.
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
    """Whether a call that was read off a process is about a socket."""
    return call in ("read", "socket") and _leads_to(pid, first, ("socket:",))


def _leads_to(pid: int, descriptor: int, kinds: tuple[str, ...]) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(kinds)
    except OSError:
        return False


def _switches(pid: int) -> int:
    try:
        return int(psutil.Process(pid).num_ctx_switches().voluntary)
    except psutil.Error:
        return 0


# -- how fast the CPU cores run that ranks are on, by the kernel (Linux, ``cpufreq``)


MOST_CLOCKS = 16
"""Ranks whose cores are looked at."""


class CoreClocks:
    """The highest clock that was read of each rank's core.

    A core that waits may run slowly; one that is at work does so only if it cannot run faster.

    Args:
        processes: The kernel's files of processes.
        cores: Those of cores; without frequencies there, as in many virtual machines,
            nothing is known.
    """

    def __init__(
        self, processes: Path = PROC, cores: Path = Path("/sys/devices/system/cpu")
    ) -> None:
        self._processes, self._cores = processes, cores
        self._seen: dict[int, CoreClock] = {}

    def look(self, pids: Mapping[int, int]) -> None:
        """Read the clock of the core that each rank is on; ``pids`` by rank."""
        for rank, pid in list(pids.items())[:MOST_CLOCKS]:
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
        """What was read, by rank; empty where nothing is known."""
        return tuple(self._seen[rank] for rank in sorted(self._seen))
