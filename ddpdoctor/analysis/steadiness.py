"""Whether a rank does the same in one examination after another, so that it will not go on."""

from __future__ import annotations

import ast

from ddpdoctor.analysis.hang_snapshot import RankState
from ddpdoctor.analysis.places import location
from ddpdoctor.analysis.process_activity import moves_data
from ddpdoctor.analysis.sources import Loop, source_of
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.stacks.model import Frame
from ddpdoctor.stacks.user_frames import is_probe_path, is_user_path

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
    if len({_place(frames, now) for frames in looks if frames}) != 1:
        return first
    if got < MORE * before.steadied:
        return {"steady": before.steady, "steadied": before.steadied}
    return {"steady": before.steady + 1, "steadied": got}


def _place(frames: tuple[Frame, ...], rank: RankState) -> tuple[object, ...]:
    """Where a thread is: its lines, of those in a ``while`` that only waits the loop alone."""
    frames = tuple(frame for frame in frames if not is_probe_path(frame.path))
    for number, frame in reversed(list(enumerate(frames))):
        if not is_user_path(frame.path):
            # A loop that calls torch is at work.
            if "/torch/" in frame.path:
                break
            continue
        loop = _waiting_loop(frame, rank)
        if loop is not None:
            return *frames[:number], frame.path, frame.function, loop.lineno
    return frames


def _waiting_loop(frame: Frame, rank: RankState) -> Loop | None:
    """The ``while`` around a line, unless it is a loop of the training."""
    source = source_of(frame.path)
    loops = source.around(frame.line) if source is not None else []
    for loop in loops:
        if not isinstance(loop, ast.While):
            return None
        trains = any(
            at is not None
            and at.path == frame.path
            and loop.lineno <= at.line <= (loop.end_lineno or 0)
            for at in map(location, map(str, (rank.record.get("sites") or {}).values()))
        )
        return None if trains else loop
    return None
