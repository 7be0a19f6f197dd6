"""What a rank's process was seen to do within a second: compute, read, wait for a socket."""

from __future__ import annotations

from ddpdoctor.analysis.hang_snapshot import BUSY, RankState

MOVING = 1 << 20
"""Bytes within a second above which a process visibly reads or writes."""

LIVELY = 10
"""Times within a second that a process got what it waited for at a socket: something comes."""

STIRS = 0.02
"""Share of a core, from one examination to the next, that a process does not use by only waiting
with a timeout."""


def doing(rank: RankState) -> str:
    """What its process can be seen to do: ``idle``, ``computing (97 % of a core)``."""
    seen = []
    if rank.activity("characters") >= MOVING or rank.activity("disk") >= MOVING:
        amount = max(rank.activity("characters"), rank.activity("disk"))
        seen.append(f"reading or writing {shown_bytes(amount)}/s")
    elif _exchanges(rank):
        seen.append("sending or receiving over the network")
    cpu, below = rank.activity("cpu"), rank.activity("children_cpu")
    if computes(rank):
        seen.append(computing(cpu))
    elif children_compute(rank):
        seen.append(f"waiting for its child processes, which are {computing(below)}")
    return ", ".join(seen) or "idle"


def computing(cpu: float) -> str:
    """With how much of a core; little, if others have it."""
    if cpu >= BUSY:
        return f"computing ({percent(cpu)} of a core)"
    return f"short of CPU (gets {percent(cpu)} of a core)"


def computes(rank: RankState) -> bool:
    """Whether it computes, or would if it had a core."""
    return rank.busy >= BUSY or rank.on_queue


def children_compute(rank: RankState) -> bool:
    """Whether a child process of it computes, or would if it had a core."""
    share = max(rank.activity("children_busy"), rank.activity("children_cpu"))
    return share >= BUSY or "R" in _text(rank, "children_letters")


def _text(rank: RankState, key: str) -> str:
    value = (rank.record.get("activity") or {}).get(key)
    return value if isinstance(value, str) else ""


def lacks_cpu(rank: RankState, limit: float) -> bool:
    """Whether it works, and had no core for so much of its silence that this is why it is late."""
    got = rank.seconds - rank.lost
    # Its silence is counted in whole seconds.
    return rank.lost > got and got < limit + 1 and works(rank)


def starves(rank: RankState) -> bool:
    """Whether it would do something if it had a core."""
    return computes(rank) and rank.activity("cpu") < BUSY


def moves_data(rank: RankState) -> bool:
    """Whether data come and go, or child processes do anything, though it stays where it is."""
    return (
        children_compute(rank)
        or rank.activity("since_children_cpu") >= STIRS
        or rank.activity("characters") >= MOVING
        or rank.activity("disk") >= MOVING
        or _exchanges(rank)
    )


def works(rank: RankState) -> bool:
    """Whether it makes progress that can be seen from outside."""
    return computes(rank) or moves_data(rank) or stirs(rank)


def stirs(rank: RankState) -> bool:
    """Whether it did anything since it was looked at before (`examination`)."""
    return (
        rank.activity("wrote") > 0
        or rank.activity("since_cpu") >= STIRS
        or rank.activity("since_children_cpu") >= STIRS
    )


def waits_for_network(rank: RankState) -> bool:
    """Whether it, or a process that it started, waits for something from a socket."""
    return is_seen(rank, "network") or is_seen(rank, "children_network")


def is_seen(rank: RankState, key: str) -> bool:
    """Whether something was seen of it (`ddpdoctor.system.activity`)."""
    return bool((rank.record.get("activity") or {}).get(key))


def _exchanges(rank: RankState) -> bool:
    """Whether something comes or goes at a socket that it waits for."""
    return is_seen(rank, "network") and rank.activity("switches") >= LIVELY


def percent(share: float) -> str:
    """A share of a core, 0 to 1: ``97 %``."""
    return f"{100 * share:.0f} %"


def shown_bytes(number: float) -> str:
    """A number of bytes: ``1.5 MB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"
