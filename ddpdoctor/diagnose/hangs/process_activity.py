"""The activity of a rank's process, its loader workers and its GPU, and whether it repeats.

A GPU's progress is known from torch's Flight Recorder if it records the starts of collectives
(TORCH_NCCL_ENABLE_TIMING), and from the probe's markers at the boundaries of phases.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.hangs.hang_snapshot import MIN_PENDING_NS, RankState
from ddpdoctor.diagnose.source_files import brief, holds, location, names_in, quoted, source_of
from ddpdoctor.run.records.supervisor import ChildState, Frame, RankEvidence
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks.frames import is_probe_path, is_user_path
from ddpdoctor.system.process_activity import BUSY

# -- the work of a GPU

Arrival = Literal["there", "close", "behind", "unknown"]
"""A GPU's progress: it has started the collective in which its rank waits, has passed all markers
before it (work of that backward may remain), or is still at earlier work."""

STUCK_GPU = (
    "Look for a kernel that does not end, or a stream that waits for an event that never comes; "
    "with CUDA_LAUNCH_BLOCKING=1 the host stops at the line that queued it."
)
"""The fix to suggest for a GPU that makes no progress."""

_WAITS = (Phase.BACKWARD.label, Phase.WAIT.label)  # Phases in which collectives are called


def gpu_arrival(rank: RankState) -> Arrival:
    """Return the progress of a rank's GPU towards the collective in which the rank waits."""
    call = rank.pending
    if call is None:
        return "unknown" if "nccl" in rank.evidence.backend else "there"
    if call.backend != "nccl" or call.started:
        return "there"
    timed = any(each.timed for each in rank.flight or () if each.numbering == call.numbering)
    if timed or _first_mark(rank) is not None:
        return "behind"
    return "close" if _began(rank) else "unknown"


def gpu_work(rank: RankState) -> tuple[str, Location | None]:
    """Describe the work of a GPU that is behind, and return its line."""
    marks, at = rank.evidence.device, _first_mark(rank)
    if at is None:
        place = _site(rank, Phase.BACKWARD.label) if _began(rank) else None
        return (f"backward at {quoted(place)}" if place else "what was queued before it"), place
    place = _site(rank, marks[at].phase)
    if place is not None:
        return f"{marks[at].phase} at {quoted(place)}", place
    # The script queued work between two phases.
    sides = [("after", marks[at - 1].phase)] if at else []
    sides += [("before", each.phase) for each in marks[at + 1 : at + 2]]
    known = [(word, phase, site) for word, phase in sides if (site := _site(rank, phase))]
    where = [f"{word} {phase} at {brief(site)}" for word, phase, site in known]
    text = f"what was queued {' and '.join(where) or 'before it'}"
    return text, known[-1][2] if known else None


def gpu_holds_host(rank: RankState) -> bool:
    """Return whether a rank's host waits for its GPU's own work, not for a collective."""
    stays = rank.later_frames == rank.frames and bool(rank.frames)
    return rank.pending is None and stays and _first_mark(rank) is not None


def _first_mark(rank: RankState) -> int | None:
    """Return the first marker that its GPU has not passed, if it was queued before the collective.

    Without a current collective, the marker must have been queued some time ago.
    """
    if rank.evidence.sends:
        # The GPU may wait for a send or a receive of another rank.
        return None
    call = rank.pending
    before = call.began if call is not None else rank.taken - MIN_PENDING_NS
    for number, mark in enumerate(rank.evidence.device):
        if not mark.passed:
            return number if mark.queued <= before else None
    return None


def _began(rank: RankState) -> bool:
    """Return whether its GPU has reached the backward or the call of the collective.

    Steps that are followed only in part have no markers between their phases.
    """
    marks, call = rank.evidence.device, rank.pending
    if not marks or call is None or not marks[0].passed or marks[0].queued > call.began:
        return False
    if len(marks) > 1:
        return marks[1].phase in _WAITS and marks[1].queued > call.began
    return rank.phase in _WAITS and marks[0].queued >= rank.evidence.since


def _site(rank: RankState, phase: str) -> Location | None:
    return location(rank.evidence.sites.get(phase, ""))


# -- activity of a rank's process within a second: compute, read, wait for a socket

MIN_MOVED = 1 << 20  # Minimum bytes per second to count as reading or writing
MIN_ARRIVALS = 10  # Minimum number of wake-ups at a socket per second that shows arriving data
MIN_STIR = 0.02  # Minimum use of a core between two examinations. Waiting with a timeout uses less.


def doing(rank: RankState) -> str:
    """Describe the visible activity of its process: ``idle``, ``computing (97 % of a core)``."""
    activity, seen = rank.activity, []
    moved = max(activity.characters, activity.disk)
    if moved >= MIN_MOVED:
        seen.append(f"reading or writing {shown_bytes(moved)}/s")
    elif _exchanges(rank):
        seen.append("sending or receiving over the network")
    if computes(rank):
        seen.append(computing(activity.cpu))
    elif children_compute(rank):
        below = computing(activity.children_cpu)
        seen.append(f"waiting for its child processes, which are {below}")
    return ", ".join(seen) or "idle"


def computing(cpu: float) -> str:
    """Describe a computing process with its share of a core, which is small if others use it."""
    if cpu >= BUSY:
        return f"computing ({percent(cpu)} of a core)"
    return f"short of CPU (gets {percent(cpu)} of a core)"


def computes(rank: RankState) -> bool:
    """Return whether it computes, or would if it had a core."""
    return rank.busy >= BUSY or rank.on_queue


def children_compute(rank: RankState) -> bool:
    """Return whether a child process computes, or would if it had a core."""
    activity = rank.activity
    share = max(activity.children_busy, activity.children_cpu)
    return share >= BUSY or "R" in activity.children_letters


def lacks_cpu(rank: RankState, limit: float) -> bool:
    """Return whether it works, and is late because it lacked a core for most of its silence."""
    lost = rank.evidence.lost
    got = rank.seconds - lost
    # One second more, because its silence is counted in whole seconds.
    return lost > got and got < limit + 1 and works(rank)


def starves(rank: RankState) -> bool:
    """Return whether it would compute if it had a core."""
    return computes(rank) and rank.activity.cpu < BUSY


def moves_data(rank: RankState) -> bool:
    """Return whether it moves data, or its child processes work, while it stays at one line."""
    activity = rank.activity
    return (
        children_compute(rank)
        or (activity.since_children_cpu or 0) >= MIN_STIR
        or max(activity.characters, activity.disk) >= MIN_MOVED
        or _exchanges(rank)
    )


def works(rank: RankState) -> bool:
    """Return whether it makes visible progress."""
    return computes(rank) or moves_data(rank) or stirs(rank)


def stirs(rank: RankState) -> bool:
    """Return whether it was active since the last examination."""
    activity = rank.activity
    used = max(activity.since_cpu or 0, activity.since_children_cpu or 0)
    return activity.wrote > 0 or used >= MIN_STIR


def waits_for_network(rank: RankState) -> bool:
    """Return whether it, or a process that it started, waits at a socket."""
    return rank.activity.network or rank.activity.children_network


def _exchanges(rank: RankState) -> bool:
    """Return whether data moves through a socket on which it waits."""
    return rank.activity.network and rank.activity.switches >= MIN_ARRIVALS


def percent(share: float) -> str:
    """Format a share of a core: ``97 %``."""
    return f"{100 * share:.0f} %"


def shown_bytes(number: float) -> str:
    """Format a number of bytes: ``1.5 MB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"


# -- the workers of a DataLoader while a rank waits for their batch


def workers_of(rank: RankState) -> list[ChildState]:
    """Return the child processes of a rank that may be its loader's workers."""
    children = rank.stacks.state.children if rank.stacks is not None else ()
    return [child for child in children if "resource_tracker" not in child.command]


def workers_activity(rank: RankState, children: Sequence[ChildState]) -> tuple[str, Severity, str]:
    """Describe the activity of a DataLoader's workers, with the severity and the fix."""

    def some(number: int) -> str:
        return "which" if one else f"{'one' if number == 1 else number} of which"

    dead = [child for child in children if child.letter in ("Z", "X")]
    stopped = [child for child in children if child.letter in ("T", "t")]
    number, one = len(children), len(children) == 1
    if dead:
        return f"{some(len(dead))} died", Severity.ERROR, "Look at the worker's own output."
    if stopped:
        what = f"{some(len(stopped))} {'is' if len(stopped) == 1 else 'are'} stopped (SIGSTOP)"
        return what, Severity.ERROR, f"Continue it: `kill -CONT {stopped[0].pid}`."
    if not number:
        return "which are gone", Severity.ERROR, "Look at the workers' own output."
    if rank.activity.children_network:
        fix = "Look at the storage that the data come from, and give each request a timeout."
        return f"{some(1)} waits for the network", Severity.WARNING, fix
    if children_compute(rank):
        what = f"which {'is' if one else 'are'} {computing(rank.activity.children_cpu)}"
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


# -- whether a rank does the same in several examinations in a row, so that it is stuck

MIN_STEADY = 3  # Number of consecutive examinations after which an activity counts as lasting
_LONGER = 1.5  # Minimum factor by which the silence has to grow before another examination counts


def lasts(rank: RankState) -> bool:
    """Return whether a rank did the same in consecutive examinations, and moved no data."""
    return rank.evidence.steady >= MIN_STEADY and not moves_data(rank)


def with_steadiness(now: RankState, before: RankState | None) -> RankEvidence:
    """Return a rank's evidence with ``steady`` and ``steadied``, given its previous examination.

    An examination counts if the rank's silence has grown by half since the last one that counted.
    Time without a core is not silence.
    """
    got = now.seconds - now.evidence.lost
    first = replace(now.evidence, steady=1, steadied=got)
    if before is None:
        return first
    known = before.evidence
    if (now.evidence.pid, now.evidence.since) != (known.pid, known.since):
        return first
    samples = [before.frames, before.later_frames, now.frames, now.later_frames]
    seen = [
        tuple(frame for frame in frames if not is_probe_path(frame.path))
        for frames in samples
        if frames
    ]
    loops = {_polling(frames, now) for frames in samples if frames}
    # A computing rank may process the next piece of data, unless it waits for others.
    waits = not computes(now) or now.in_collective or gpu_holds_host(now)
    if not (len(loops) == 1 and None not in loops) and not (waits and len(set(seen)) == 1):
        return first
    if got < _LONGER * known.steadied:
        return replace(first, steady=known.steady, steadied=known.steadied)
    return replace(first, steady=known.steady + 1)


def _polling(frames: tuple[Frame, ...], rank: RankState) -> tuple[object, ...] | None:
    """Return the polling loop around a stack's frame, with the frames that led to it, or None."""
    for number, frame in reversed(list(enumerate(frames))):
        if is_user_path(frame.path):
            loop = _polling_loop(frame, rank)
            if loop is not None:
                return *frames[:number], frame.path, frame.function, loop.lineno
        elif "/torch/" in frame.path:
            # A computing rank is at work.
            return None
    return None


def _polling_loop(frame: Frame, rank: RankState) -> ast.While | None:
    """Return the ``while`` around a line if its body sets no name that its condition tests.

    Skip the training loop, and a loop that computes until a result is good enough.
    """
    source = source_of(frame.path)
    loop = next(iter(source.around(frame.line)), None) if source is not None else None
    if not isinstance(loop, ast.While) or isinstance(loop.test, ast.Constant):
        return None
    sites = map(location, rank.evidence.sites.values())
    if any(at is not None and at.path == frame.path and holds(loop, at.line) for at in sites):
        return None
    stored = names_in(*loop.body, stored=True)
    return loop if stored.isdisjoint(names_in(loop.test)) else None
