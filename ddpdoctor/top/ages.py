"""How long ago something changed, whatever clocks say: those of ranks jump, and differ by node."""

from __future__ import annotations

from collections.abc import Hashable


class Ages:
    """Knows since when each value is what it is, by this process's own clock where it can."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[int, float, float]] = {}

    def age(self, key: Hashable, stamp: int, now: int, ticks: float) -> float:
        """Seconds since ``stamp`` was set.

        Args:
            key: Whose stamp.
            stamp: Unix nanoseconds by the clock of who set it.
            now: Unix nanoseconds here.
            ticks: Seconds of a clock here that never jumps.
        """
        known = self._known.get(key)
        told = max(0.0, (now - stamp) / 1e9)
        if known is not None and known[0] == stamp:
            since = known[1]
        elif known is not None:
            # It changed after the last look.
            since = max(known[2], ticks - told)
        else:
            since = ticks - told
        self._known[key] = (stamp, since, ticks)
        return ticks - since
