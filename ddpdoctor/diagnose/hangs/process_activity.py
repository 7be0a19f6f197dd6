"""What a rank's process, its loader workers and its GPU were seen doing, and whether that repeats.

How far a GPU has come is known from torch's Flight Recorder where it records when collectives start
(TORCH_NCCL_ENABLE_TIMING), and from the probe's own markers at the boundaries of phases.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.opening import integer
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.hangs.hang_snapshot import BUSY, QUEUED, RankState
from ddpdoctor.diagnose.source_files import brief, holds, location, quoted, source_of
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks.frames import is_probe_path, is_user_path
from ddpdoctor.stacks.rank_stacks import Frame
from ddpdoctor.system.process_activity import ChildState

# -- gpu work


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


def gpu_arrival(rank: RankState) -> Arrival:
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


def gpu_work(rank: RankState) -> tuple[str, Location | None]:
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


def gpu_holds_host(rank: RankState) -> bool:
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


# -- what a rank's process was seen to do within a second: compute, read, wait for a socket


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
    """Whether something was seen of it (`ddpdoctor.system.process_activity`)."""
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


# -- what the worker processes of a DataLoader do while a rank waits for their batch


def workers_of(rank: RankState) -> list[ChildState]:
    """The child processes of a rank that may be its loader's workers."""
    children = rank.stacks.state.children if rank.stacks is not None else ()
    return [child for child in children if "resource_tracker" not in child.command]


def workers_activity(rank: RankState, children: Sequence[ChildState]) -> tuple[str, Severity, str]:
    """What the workers of a DataLoader do, how bad that is, and what to do about it."""
    dead = [child for child in children if child.letter in ("Z", "X")]
    stopped = [child for child in children if child.letter in ("T", "t")]
    number, one = len(children), len(children) == 1
    if dead:
        what = "which died" if one else f"{_count(len(dead))} of which died"
        return what, Severity.ERROR, "See the worker's own output for why."
    if stopped:
        who = "which" if one else f"{_count(len(stopped))} of which"
        what = f"{who} {_be(len(stopped))} stopped (SIGSTOP)"
        return what, Severity.ERROR, f"Continue it: `kill -CONT {stopped[0].pid}`."
    if not number:
        return "which are gone", Severity.ERROR, "See the workers' own output for why."
    if is_seen(rank, "children_network"):
        what = f"{'which waits' if one else 'one of which waits'} for the network"
        fix = "Look at the storage that the data come from, and give each request a timeout."
        return what, Severity.WARNING, fix
    if children_compute(rank):
        what = f"which {_be(number)} {computing(rank.activity('children_cpu'))}"
        return what, Severity.WARNING, "Make loading faster, or use more workers."
    if stirs(rank):
        what = f"which work{'s' if one else ''} now and then"
        return what, Severity.WARNING, "Make loading faster, or use more workers."
    return (
        f"which sleep{'s' if one else ''}, too: deadlocked",
        Severity.ERROR,
        "A worker waits for a lock, a queue or a file: a lock that was held when it was forked "
        "(threads, a library with a pool) never opens. Try `multiprocessing_context='spawn'` "
        "or num_workers=0.",
    )


def _count(number: int) -> str:
    return "one" if number == 1 else str(number)


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


# -- whether a rank does the same in one examination after another, so that it will not go on


LASTING = 3
"""Examinations in a row after which what a rank does is taken to last."""

MORE = 1.5
"""How much longer it has been silent, as a factor, when an examination counts."""


def lasts(rank: RankState) -> bool:
    """Whether what a rank does lasts: so many examinations saw the same, and no data that move."""
    return rank.steady >= LASTING and not moves_data(rank)


def steadiness(now: RankState, before: RankState | None) -> JsonObject:
    """In how many examinations in a row a rank did the same, and how long it had been silent then.

    An examination counts if the rank has been silent for longer by half since the last one that
    did, without the time in which it had no core.

    Args:
        now: The rank.
        before: The same in the examination before this one.
    """
    got = now.seconds - now.lost
    first: JsonObject = {"steady": 1, "steadied": got}
    if before is None or any(now.record.get(k) != before.record.get(k) for k in ("pid", "since")):
        return first
    looks = [before.frames, before.later_frames, now.frames, now.later_frames]
    seen = [frames for frames in looks if frames]
    loops = {_polling(frames, now) for frames in seen}
    # One that computes may do the same with the next piece of data, but not to wait for others.
    waits = not computes(now) or now.in_collective or gpu_holds_host(now)
    same = (len(loops) == 1 and None not in loops) or (
        waits and len({*map(_user_frames, seen)}) == 1
    )
    if not same:
        return first
    if got < MORE * before.steadied:
        return {"steady": before.steady, "steadied": before.steadied}
    return {"steady": before.steady + 1, "steadied": got}


def _user_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """A stack without the probe's part."""
    return tuple(frame for frame in frames if not is_probe_path(frame.path))


def _polling(frames: tuple[Frame, ...], rank: RankState) -> tuple[object, ...] | None:
    """The loop that a stack is in, with what led to it, if that only polls."""
    for number, frame in reversed(list(enumerate(frames))):
        if is_user_path(frame.path):
            loop = _polling_loop(frame, rank)
            if loop is not None:
                return *frames[:number], frame.path, frame.function, loop.lineno
        elif "/torch/" in frame.path:
            # It is at work.
            return None
    return None


def _polling_loop(frame: Frame, rank: RankState) -> ast.While | None:
    """The ``while`` around a line that waits for something: it sets nothing that it tests.

    Not one of the training, nor one that computes until a result is good enough.
    """
    source = source_of(frame.path)
    loop = next(iter(source.around(frame.line)), None) if source is not None else None
    if not isinstance(loop, ast.While) or isinstance(loop.test, ast.Constant):
        return None
    sites = map(location, map(str, (rank.record.get("sites") or {}).values()))
    if any(at is not None and at.path == frame.path and holds(loop, at.line) for at in sites):
        return None
    tested = {each.id for each in ast.walk(loop.test) if isinstance(each, ast.Name)}
    inside = (each for part in loop.body for each in ast.walk(part))
    names = (each for each in inside if isinstance(each, ast.Name))
    return None if any(isinstance(n.ctx, ast.Store) and n.id in tested for n in names) else loop
