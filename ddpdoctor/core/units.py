"""Numbers with units, as people read them; most fit four columns. What is not known is ``-``."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

MISSING = "-"


class TimeUnit(NamedTuple):
    """A unit that several times share, so that they compare at a glance."""

    name: str
    factor: float


_MICROSECONDS, _MILLISECONDS, _SECONDS = TimeUnit("us", 1e6), TimeUnit("ms", 1e3), TimeUnit("s", 1)


def unit_for(longest: float) -> TimeUnit:
    """The unit in which times up to ``longest`` seconds have few digits."""
    if longest < 1e-3:
        return _MICROSECONDS
    return _MILLISECONDS if longest < 10 else _SECONDS


def _where_known(show: Callable[[float], str]) -> Callable[[float | None], str]:
    @wraps(show)
    def shown(value: float | None) -> str:
        return MISSING if value is None or not math.isfinite(value) else show(value)

    return shown


@_where_known
def figures(value: float) -> str:
    """A number in at most four columns (five from a million on), with the digits that matter."""
    size = abs(value)
    if size < 0.005:
        return "0"
    for limit, digits in ((9.995, 2), (99.95, 1), (9999.5, 0)):
        if size < limit:
            return f"{value:.{digits}f}"
    return _scaled(value, 1000, "kMGTP")


def _scaled(value: float, base: int, letters: str) -> str:
    for letter in letters:
        value /= base
        if abs(value) < 9.95:
            return f"{value:.1f}{letter}"
        if abs(value) < 999.5:
            break
    return f"{value:.0f}{letter}"


def time_in(value: float | None, unit: TimeUnit) -> str:
    """Seconds in a unit, without its name."""
    return figures(None if value is None else value * unit.factor)


def time(seconds: float) -> str:
    """A time with three digits and its unit: ``31.0 ms``, ``1.23 s``."""
    unit = unit_for(seconds if seconds < 1 else math.inf)
    return f"{time_in(seconds, unit)} {unit.name}"


@_where_known
def duration(seconds: float) -> str:
    """A time in words: ``31.0 ms``, ``1.2 s``, ``5 min``."""
    seconds = max(seconds, 0.0)
    if seconds < 0.9995:
        return time(seconds)
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


@_where_known
def age(seconds: float) -> str:
    """A time in at most four columns: ``3s``, ``2m``, ``5h``, ``4d``."""
    for limit, size, letter in ((120, 1, "s"), (7200, 60, "m"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / size:.0f}{letter}"
    return f"{seconds / 86400:.0f}d"


@_where_known
def size(count: float) -> str:
    """Bytes in at most four columns: ``640M``, ``9.5G``, ``71G``."""
    return f"{count:.0f}B" if count < 1000 else _scaled(count, 1024, "KMGTP")


@_where_known
def percent(ratio: float) -> str:
    """A ratio in at most four columns: ``87%``."""
    return f"{ratio * 100:.0f}%"


@_where_known
def watts(power: float) -> str:
    """A power in at most four columns: ``412W``."""
    return f"{power:.0f}W"


@_where_known
def degrees(celsius: float) -> str:
    """A temperature: ``61C``."""
    return f"{celsius:.0f}C"


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 rank``, ``2 ranks``; ``plural`` is for nouns that take no s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
