"""What processes did within a second, as the kernel counts it: CPU time, bytes read and written."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ddpdoctor.launch import kernel
from ddpdoctor.record import Record

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
    """Bytes that went through ``read`` and ``write``: files, pipes, terminals."""
    disk: int = 0
    """Bytes that devices moved for it."""
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


def sample(pid: int) -> Sample:
    """Look at a process."""
    letter, cpu = _stat(pid)
    if not letter:
        return Sample("")
    characters, disk = _io(pid)
    below = _below(pid)
    children_cpu = sum(_stat(child)[1] for child in below)
    call, first = _system_call(pid)
    reads_input = call == "read" and first == 0
    return Sample(
        letter,
        cpu,
        children_cpu,
        characters,
        disk,
        input=reads_input,
        terminal=reads_input and _leads_to(pid, 0, ("/dev/pts/", "/dev/tty")),
        network=call == "poll" or _at_socket(pid, call, first),
        children_network=any(_at_socket(child, *_system_call(child)) for child in below),
        switches=_switches(pid),
    )


def compared(before: Sample, after: Sample, seconds: float) -> Record:
    """What happened between two samples, as a record: shares of a core, bytes, the last state."""
    return {
        "seconds": round(seconds, 2),
        "letters": before.letter + after.letter,
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


def cpu_of_tree(pid: int) -> float:
    """Seconds of CPU time of a process and of all below it."""
    return _stat(pid)[1] + sum(_stat(each)[1] for each in _below(pid))


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
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, ValueError, IndexError):
        return "", 0.0


def _io(pid: int) -> tuple[int, int]:
    try:
        with open(f"/proc/{pid}/io") as file:
            told = dict(line.split(": ") for line in file.read().splitlines())
        return (
            int(told["rchar"]) + int(told["wchar"]),
            int(told["read_bytes"]) + int(told["write_bytes"]),
        )
    except (OSError, ValueError, KeyError):
        return 0, 0


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
        with open(f"/proc/{pid}/task/{pid}/status") as file:
            told = file.read().rpartition("\nvoluntary_ctxt_switches:")[2].split()
        return int(told[0])
    except (OSError, ValueError, IndexError):
        return 0
