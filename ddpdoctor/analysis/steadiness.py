"""Whether a rank does the same in one examination after another, so that it will not go on."""

from __future__ import annotations

import ast

from ddpdoctor.analysis.gpu_work import holds_host
from ddpdoctor.analysis.hang_snapshot import RankState
from ddpdoctor.analysis.places import location
from ddpdoctor.analysis.process_activity import computes, moves_data
from ddpdoctor.analysis.sources import holds, source_of
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
    seen = [frames for frames in looks if frames]
    loops = {_polling(frames, now) for frames in seen}
    # One that computes may do the same with the next piece of data, but not to wait for others.
    waits = not computes(now) or now.in_collective or holds_host(now)
    same = (len(loops) == 1 and None not in loops) or (waits and len({*map(_lines, seen)}) == 1)
    if not same:
        return first
    if got < MORE * before.steadied:
        return {"steady": before.steady, "steadied": before.steadied}
    return {"steady": before.steady + 1, "steadied": got}


def _lines(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
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
