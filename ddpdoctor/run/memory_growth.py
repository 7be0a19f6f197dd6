"""Find steady growth in a series of readings of memory. Standard library only: ranks load this.

A leak adds about the same in each step. Warm-up, caches and fragmentation add less and less, longer
batches add sometimes, and what is freed after each pass over the data comes back down. So a span of
steps is cut into segments, whose lowest readings have to rise evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

SEGMENTS = 6  # of a span
EARLY_SEGMENTS = 4  # of the span of a rank that grows too fast to wait for more steps
MIN_POINTS = 2  # readings in each segment
MIN_RISE, MAX_RISE = 0.5, 1.8  # how much a segment may rise, by the mean
MIN_LATE_RISE = 0.88  # how much the later half of the segments rises at least, by the mean
SPANS = (
    4,
    2,
)  # a span begins at the first step of these parts of all steps, or is the last quarter
MIN_STEP = 4  # steps at the beginning that do not count


class Growth(NamedTuple):
    """Steady growth of memory over a span of steps. Sizes are bytes."""

    start: int  # First step of the span
    end: int
    low: int  # The lowest reading in the span's first segment
    high: int  # The lowest in its last one
    per_step: float

    @property
    def size(self) -> int:
        """How much memory was added."""
        return self.high - self.low


def steady_growth(
    points: Sequence[tuple[int, int]], least: int, segments: int = SEGMENTS, warm_up: float = 0.25
) -> Growth | None:
    """Return the growth over the longest span of steps up to the newest in which it is steady.

    The spans are all steps but those of the warm-up, the last half, and the last quarter.

    Args:
        points: Steps, ascending, and bytes.
        least: Bytes by which memory has to grow.
        segments: Number of segments of the span.
        warm_up: The part of all steps that does not count.
    """
    if not points:
        return None
    first, last = max(points[0][0], MIN_STEP), points[-1][0]
    for part in (warm_up, 0.5, 0.75):
        start = first + part * (last - first)
        found = _in_span([each for each in points if each[0] >= start], segments)
        if found is not None and found.size >= least:
            return found
    return None


def _in_span(points: Sequence[tuple[int, int]], segments: int) -> Growth | None:
    if len(points) < segments * MIN_POINTS:
        return None
    start, end = points[0][0], points[-1][0]
    length = (end - start + 1) / segments
    readings: list[list[tuple[int, int]]] = [[] for _ in range(segments)]
    for step, value in points:
        readings[min(int((step - start) / length), segments - 1)].append((value, step))
    if any(len(each) < MIN_POINTS for each in readings):
        return None
    # The lowest reading of a segment of a leak is its first. Of equal ones take the first, too.
    lows = [min(each) for each in readings]
    rises = [after[0] - before[0] for before, after in pairwise(lows)]
    mean = sum(rises) / len(rises)
    late = rises[len(rises) // 2 :]
    if (
        mean <= 0
        or min(rises) < MIN_RISE * mean
        or max(rises) > MAX_RISE * mean
        or sum(late) < MIN_LATE_RISE * mean * len(late)
    ):
        return None
    (low, begun), (high, ended) = lows[0], lows[-1]
    return Growth(start, end, low, high, (high - low) / max(ended - begun, 1))
