"""Numbers as people read them, in a few columns. What is not known is ``-``."""

from __future__ import annotations

import math
from typing import NamedTuple

MISSING = "-"


class TimeUnit(NamedTuple):
    """The unit that all times of a board share, so that they compare at a glance."""

    name: str
    factor: float


_UNITS = (TimeUnit("us", 1e6), TimeUnit("ms", 1e3), TimeUnit("s", 1.0))


def unit_for(longest: float) -> TimeUnit:
    """The unit in which a board's times have few digits."""
    if longest < 1e-3:
        return _UNITS[0]
    return _UNITS[1] if longest < 10 else _UNITS[2]


def known(value: float | None) -> bool:
    """Whether there is a number, and one that can be shown."""
    return value is not None and math.isfinite(value)


def figures(value: float | None) -> str:
    """A number in at most four columns (five from a million on), with the digits that matter."""
    if value is None or not math.isfinite(value):
        return MISSING
    size = abs(value)
    if size < 0.005:
        return "0"
    for limit, digits in ((9.995, 2), (99.95, 1), (9999.5, 0)):
        if size < limit:
            return f"{value:.{digits}f}"
    return _scaled(value, 1000, ("k", "M", "G", "T", "P"))


def _scaled(value: float, base: int, letters: tuple[str, ...]) -> str:
    for letter in letters:
        value /= base
        if abs(value) < 9.95:
            return f"{value:.1f}{letter}"
        if abs(value) < 999.5:
            return f"{value:.0f}{letter}"
    return f"{value:.0f}{letters[-1]}"


def time_in(value: float | None, unit: TimeUnit) -> str:
    """A time in a board's unit, without naming it."""
    return figures(None if value is None else value * unit.factor)


def duration(value: float | None) -> str:
    """A time in words: ``31 ms``, ``1.2 s``, ``5 min``."""
    if value is None or not math.isfinite(value):
        return MISSING
    value = max(value, 0.0)
    if value < 1:
        unit = unit_for(value)
        return f"{time_in(value, unit)} {unit.name}"
    if value < 120:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def age(value: float | None) -> str:
    """A time in at most four columns: ``3s``, ``2m``, ``5h``, ``4d``."""
    if value is None or not math.isfinite(value):
        return MISSING
    for limit, size, letter in ((120, 1, "s"), (7200, 60, "m"), (172800, 3600, "h")):
        if value < limit:
            return f"{max(value, 0) / size:.0f}{letter}"
    return f"{value / 86400:.0f}d"


def size(value: int | None) -> str:
    """Bytes in at most four columns: ``640M``, ``9.5G``, ``71G``."""
    if value is None:
        return MISSING
    return f"{value}B" if value < 1000 else _scaled(value, 1024, ("K", "M", "G", "T", "P"))


def percent(value: float | None) -> str:
    """A ratio in at most four columns: ``87%``."""
    return MISSING if value is None or not math.isfinite(value) else f"{value * 100:.0f}%"


def watts(value: float | None) -> str:
    """A power in at most four columns: ``412W``."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.0f}W"


def degrees(value: float | None) -> str:
    """A temperature: ``61C``."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.0f}C"
