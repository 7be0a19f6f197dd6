"""Whether a rank does the same in one examination after another, so that it will not go on."""

from __future__ import annotations

import ast

from ddpdoctor.analysis.hang_snapshot import RankState
from ddpdoctor.analysis.places import location
from ddpdoctor.analysis.process_activity import children_starve, moves_data, starves
from ddpdoctor.analysis.sources import Loop, source_of
from ddpdoctor.core.opening import integer
from ddpdoctor.stacks.model import Frame
from ddpdoctor.stacks.user_frames import is_probe_path, is_user_path

LASTING = 3
"""Examinations in a row after which what a rank does is taken to last."""


def lasts(rank: RankState) -> bool:
    """Whether what a rank does lasts: so many examinations saw the same, and no data that move."""
    return integer(rank.record, "steady") >= LASTING and not moves_data(rank)


def examinations(now: RankState, before: RankState | None) -> int:
    """How many examinations in a row, this one included, saw a rank do the same.

    One in which it had no core says nothing, and is not counted.
    """
    if before is None or any(now.record.get(k) != before.record.get(k) for k in ("pid", "since")):
        return 1
    known = integer(before.record, "steady")
    if starves(now) or children_starve(now) or 2 * now.lost > now.seconds:
        return known
    looks = [before.frames, before.later_frames, now.frames, now.later_frames]
    places = {_place(frames, now) for frames in looks if frames}
    return known + 1 if len(places) == 1 else 1


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
