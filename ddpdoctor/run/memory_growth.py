"""Find steady growth in a series of readings of memory. Standard library only: ranks load this.

A leak adds about the same amount in each step. Warm-up, caches and fragmentation add less over
time. Longer batches add memory occasionally, and some memory is freed and allocated again in each
epoch. So a span of steps is divided into segments whose lowest readings must rise evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

SEGMENTS = 6  # Number of segments of a span
EARLY_SEGMENTS = 4  # The same for a rank that grows too fast to wait for more steps
MIN_POINTS = 2  # Minimum number of readings in a segment
MIN_RISE, MAX_RISE = 0.5, 1.8  # Minimum rise between segments, as a ratio to the mean rise
MIN_LATE_RISE = 0.88  # Minimum mean rise in the later half of the segments, as the same ratio
WARM_UP_STEPS = 4  # Number of warm-up steps, which do not count


class Growth(NamedTuple):
    """Steady growth of memory over a span of steps. Sizes are in bytes."""

    start: int  # First step of the span
    end: int  # Last step of the span
    low: int  # Lowest reading in the first segment
    high: int  # Lowest reading in the last segment
    per_step: float

    @property
    def size(self) -> int:
        """The added memory."""
        return self.high - self.low


def steady_growth(
    points: Sequence[tuple[int, int]], least: int, segments: int = SEGMENTS, warm_up: float = 0.25
) -> Growth | None:
    """Return the growth over the longest span of steps with steady growth, or None.

    The candidates are all steps after the warm-up, the last half, and the last quarter.

    Args:
        points: Steps, ascending, each with a reading in bytes.
        least: Minimum growth in bytes.
        segments: Number of segments of a span.
        warm_up: Share of all steps at the beginning that does not count.
    """
    if not points:
        return None
    first, last = max(points[0][0], WARM_UP_STEPS), points[-1][0]
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
    # In a leak the lowest reading of a segment is its first. `min` takes the first of equal ones.
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
