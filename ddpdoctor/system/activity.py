"""What processes did within a second, as the kernel counts it: CPU time, bytes read and written.

CPU time alone says little where processes share the cores: who gets 3 % of one may be working as
hard as it can. So each thread is also seen to sleep, to run, or to wait for a core.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.system import proc
from ddpdoctor.system.process_state import Turns, busy, read_turns

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


def compared(before: Sample, after: Sample, seconds: float) -> JsonObject:
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
        # Since the process began.
        "ran": round(after.cpu, 2),
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
