"""The exit statuses of ranks: as they were seen, or as their launcher printed them."""

from __future__ import annotations

import re
import signal

from ddpdoctor.run.records.process import EndRecord, ErrorRecord, ExitRecord
from ddpdoctor.run.snapshot import Rank, Run

_TORCHRUN_EXIT = re.compile(r"exitcode\s*: (-?\d+)\s*\(pid: (\d+)\)")
_TORCHRUN_LOG = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")

_SPAWNED = re.compile(r"process \d+ terminated with (?:signal (SIG[A-Z]+)|exit code (\d+))")
"""What ``torch.multiprocessing.spawn`` says of the first of its processes that failed."""

_STOPPED = re.compile(r"(?:Terminating|Sending) process (\d+) (?:via|closing) signal (SIG[A-Z]+)")
"""What it says of each of the others, which it ends, and what torchrun says of them."""


def exit_status(rank: Rank, statuses: dict[int, int]) -> int | None:
    """The exit status of a rank, negative for a signal; None if it is not known.

    Args:
        rank: The rank.
        statuses: Those that its launcher printed, by pid.
    """
    if rank.exit is not None and rank.exit.status is not None:
        return rank.exit.status
    printed = statuses.get(rank.status.pid) if rank.status is not None else None
    if printed is None and rank.exit is not None and rank.exit.oom:
        return -signal.SIGKILL
    return printed


def printed_statuses(stderr: str) -> dict[int, int]:
    """Exit statuses by pid, as torchrun printed them."""
    return {
        int(pid): int(status)
        for pattern in (_TORCHRUN_EXIT, _TORCHRUN_LOG)
        for status, pid in pattern.findall(stderr)
    }


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 99`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def spawned_statuses(run: Run, ranks: tuple[Rank, ...], statuses: dict[int, int]) -> dict[int, int]:
    """The exit statuses, by pid, of ranks whose parent took them before they were seen."""
    unknown = {
        rank.status.pid: rank.exit.time
        for rank in ranks
        if rank.exit is not None
        and rank.status is not None
        and exit_status(rank, statuses) is None
        and not recorded_end(rank)
    }
    stopped = {
        int(pid): _number(name)
        for pid, name in _STOPPED.findall(run.stderr)
        if int(pid) in unknown and _number(name)
    }
    said = _SPAWNED.search(run.stderr)
    first = min(unknown.keys() - stopped.keys(), key=lambda pid: unknown[pid], default=None)
    status = _number(said[1]) or int(said[2] or 0) if said is not None else 0
    return {**stopped, **({first: status} if first is not None and status else {})}


def _number(name: str | None) -> int:
    """The exit status of a process that a signal of that name ended; 0 if there is none."""
    number = getattr(signal, name, None) if name else None
    return -int(number) if isinstance(number, signal.Signals) else 0


def recorded_end(rank: Rank) -> bool:
    """Whether a rank itself recorded how it ends."""
    return any(map(rank.records.of, (EndRecord, ErrorRecord, ExitRecord)))
