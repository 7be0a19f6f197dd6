"""What processes did within a second, as the kernel counts it: CPU time, bytes read and written.

CPU time alone tells little where processes share the cores: who gets 3 % of one may be working as
hard as it can. So each thread is also seen to sleep, to run, or to wait for a core.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ddpdoctor.run.record import Record
from ddpdoctor.system import kernel
from ddpdoctor.system.process_state import Turns, busy, read_turns

BUSY = 0.2
"""Cores that a process uses at least, of those that it gets, if it is at work."""

_TICKS = os.sysconf("SC_CLK_TCK")


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
    letter, cpu = _stat(pid)
    if not letter:
        return Sample("")
    below = _below(pid)
    moved = [_io(each) for each in (pid, *below)]
    children_cpu = sum(_stat(child)[1] for child in below)
    call, first = _system_call(pid)
    reads_input = call == "read" and first == 0
    return Sample(
        letter,
        cpu,
        children_cpu,
        sum(each.characters for each in moved),
        moved[0].written,
        sum(each.disk for each in moved),
        input=reads_input,
        terminal=reads_input and _leads_to(pid, 0, ("/dev/pts/", "/dev/tty")),
        network=call == "poll" or _at_socket(pid, call, first),
        children_network=any(_at_socket(child, *_system_call(child)) for child in below),
        switches=_switches(pid),
        turns=read_turns(pid),
        children_turns={child: read_turns(child) for child in below},
    )


def compared(before: Sample, after: Sample, seconds: float) -> Record:
    """What happened between two samples, as a record: shares of a core, bytes, the last state."""
    children = {
        child: (before.children_turns.get(child, {}), turns)
        for child, turns in after.children_turns.items()
    }
    return {
        "seconds": round(seconds, 2),
        "letters": before.letter + after.letter,
        # Of the time in which it was not kept from running; see `process_state.share`.
        "busy": round(busy(before.turns, after.turns, seconds), 3),
        "children_busy": round(sum(busy(*each, seconds) for each in children.values()), 3),
        "children_letters": "".join(
            turns[child].letter for child, (_, turns) in children.items() if child in turns
        ),
        "cpu": round(max(0.0, after.cpu - before.cpu) / seconds, 3),
        "children_cpu": round(max(0.0, after.children_cpu - before.children_cpu) / seconds, 3),
        "characters": max(0, after.characters - before.characters),
        "disk": max(0, after.disk - before.disk),
        "input": before.input and after.input,
        "terminal": before.terminal and after.terminal,
        "network": before.network or after.network,
        "children_network": before.children_network or after.children_network,
        "switches": max(0, after.switches - before.switches),
    }


def main_cpu(before: Sample, after: Sample, pid: int) -> tuple[float, float]:
    """Seconds that the main threads of a process and of its children ran between two samples."""

    def ran(pid: int, known: Turns, turns: Turns) -> float:
        return turns[pid].ran - known[pid].ran if pid in turns and pid in known else 0.0

    children = (
        ran(child, before.children_turns.get(child, {}), turns)
        for child, turns in after.children_turns.items()
    )
    return ran(pid, before.turns, after.turns), sum(children)


def turns_of(pid: int | None) -> Turns:
    """What the threads of a process have had of the cores; nothing if there is none."""
    return read_turns(pid) if pid is not None else {}


def turns_of_tree(pid: int) -> dict[int, Turns]:
    """The same of a process and of all below it, by pid."""
    return {each: read_turns(each) for each in (pid, *_below(pid))}


def works(before: Turns, after: Turns, seconds: float) -> bool:
    """Whether a process computes, or would if it had a core."""
    return busy(before, after, seconds) >= BUSY or any(
        turn.letter == "R" and before.get(thread, turn).letter == "R"
        for thread, turn in after.items()
    )


def cores_of_tree(before: Mapping[int, Turns], after: Mapping[int, Turns], seconds: float) -> float:
    """How many cores processes used, of those that they got."""
    return sum(busy(before.get(pid, {}), turns, seconds) for pid, turns in after.items())


def _below(pid: int) -> set[int]:
    """The living descendants of a process."""
    found: set[int] = set()
    fresh = kernel.children(pid)
    while fresh:
        found |= fresh
        fresh = {child for each in fresh for child in kernel.children(each)} - found
    return found


def _stat(pid: int) -> tuple[str, float]:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, ValueError, IndexError):
        return "", 0.0


class _Moved(NamedTuple):
    characters: int = 0
    written: int = 0
    disk: int = 0


def _io(pid: int) -> _Moved:
    try:
        with open(f"/proc/{pid}/io") as file:
            told = dict(line.split(": ") for line in file.read().splitlines())
        written = int(told["wchar"])
        return _Moved(
            int(told["rchar"]) + written,
            written,
            int(told["read_bytes"]) + int(told["write_bytes"]),
        )
    except (OSError, ValueError, KeyError):
        return _Moved()


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

    The kind is empty if it is another one, or the kernel does not tell.
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
        with open(f"/proc/{pid}/task/{pid}/status", errors="replace") as file:
            told = file.read().rpartition("\nvoluntary_ctxt_switches:")[2].split()
        return int(told[0])
    except (OSError, ValueError, IndexError):
        return 0
