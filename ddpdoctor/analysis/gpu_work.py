"""How far a rank's GPU has come: what it still works at, queued before the collective it is to do.

Known by torch's Flight Recorder where it records when collectives start (TORCH_NCCL_ENABLE_TIMING),
and by the probe's own markers at the boundaries of phases. Where neither is recorded, nothing is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddpdoctor.analysis.hang_snapshot import QUEUED, RankState
from ddpdoctor.analysis.places import brief, location, quoted
from ddpdoctor.core.finding import Location
from ddpdoctor.core.opening import integer
from ddpdoctor.run.status import Phase

Arrival = Literal["there", "close", "behind", "unknown"]
"""Whether a GPU has begun the collective that its rank waits in, has passed all that was marked
before it (the work of that backward may be left), or is at work that was queued before."""

STUCK_GPU = (
    "Look for a kernel that does not end, or a stream that waits for an event that never comes; "
    "with CUDA_LAUNCH_BLOCKING=1 the host stops at the line that queued it."
)
"""The fix to suggest for a GPU that makes no progress."""

_WAITS = (Phase.BACKWARD.label, Phase.WAIT.label)
"""Phases in which collectives are called."""


@dataclass(frozen=True)
class _Mark:
    phase: str
    """The one that it ends."""
    when: int
    """When the host queued it, in Unix nanoseconds."""
    passed: bool


def arrival(rank: RankState) -> Arrival:
    """How far a rank's GPU has come towards the collective that the rank waits in."""
    call = rank.pending
    if call is None:
        return "unknown" if "nccl" in str(rank.record.get("backend")) else "there"
    if call.backend != "nccl" or call.started:
        return "there"
    timed = any(each.timed for each in rank.flight or () if each.numbering == call.numbering)
    if timed or _first(rank) is not None:
        return "behind"
    return "close" if _began(rank) else "unknown"


def work(rank: RankState) -> tuple[str, Location | None]:
    """What a GPU that is behind works at, in words, and the line to look at."""
    marks, at = _marks(rank), _first(rank)
    if at is None:
        place = _site(rank, Phase.BACKWARD.label) if _began(rank) else None
        return (f"backward at {quoted(place)}" if place else "what was queued before it"), place
    place = _site(rank, marks[at].phase)
    if place is not None:
        return f"{marks[at].phase} at {quoted(place)}", place
    # Work that was queued between two phases, by the script itself.
    sides = [("after", marks[at - 1].phase)] if at else []
    sides += [("before", each.phase) for each in marks[at + 1 : at + 2]]
    known = [(word, phase, _site(rank, phase)) for word, phase in sides]
    where = [f"{word} {phase} at {brief(site)}" for word, phase, site in known if site]
    place = next((site for *_, site in reversed(known) if site), None)
    return f"what was queued {' and '.join(where) or 'before it'}", place


def holds_host(rank: RankState) -> bool:
    """Whether a rank's host waits for a GPU that is at work, and for no collective yet."""
    stays = rank.later_frames == rank.frames and bool(rank.frames)
    return rank.pending is None and stays and _first(rank) is not None


def _first(rank: RankState) -> int | None:
    """The first marker that its GPU has not passed, if that was queued before the collective.

    With none of those under way: if that was queued some time ago.
    """
    call = rank.pending
    if rank.record.get("sends"):
        # It may wait for another rank's.
        return None
    for number, mark in enumerate(_marks(rank)):
        if not mark.passed:
            before = call.began if call is not None else rank.taken - QUEUED
            return number if mark.when <= before else None
    return None


def _began(rank: RankState) -> bool:
    """Whether its GPU has come to the backward, or to the call, that the collective belongs to.

    Steps that are not seen in full have no markers between their phases.
    """
    marks, call = _marks(rank), rank.pending
    if not marks or call is None or not marks[0].passed or marks[0].when > call.began:
        return False
    if len(marks) > 1:
        return marks[1].phase in _WAITS and marks[1].when > call.began
    return rank.phase in _WAITS and marks[0].when >= integer(rank.record, "since")


def _marks(rank: RankState) -> list[_Mark]:
    recorded = rank.record.get("device")
    return [
        _Mark(str(each[0]), each[1], each[2] is True)
        for each in (recorded if isinstance(recorded, list) else ())
        if isinstance(each, list) and len(each) == 3 and isinstance(each[1], int)
    ]


def _site(rank: RankState, phase: str) -> Location | None:
    sites = rank.record.get("sites")
    return location(str(sites.get(phase) or "")) if isinstance(sites, dict) else None
