"""What repeated measurements on a shared machine allow to say: a median with its interval.

Whatever runs beside a measurement only ever adds to it, by bursts; so medians, and for their
interval no assumption but that the values were drawn alike: the order statistics between which the
median lies with 95 % probability.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

LEAST = 6
"""Values below which no two of them enclose the median with 95 % probability."""


class Interval(NamedTuple):
    """A median and where it lies with 95 % probability."""

    middle: float
    low: float
    high: float
    pairs: int

    @property
    def half(self) -> float:
        """Half of its width."""
        return (self.high - self.low) / 2

    def text(self, unit: str, digits: int) -> str:
        """``12.3 us (95 %: 11.9 to 12.8, 40 pairs)``."""
        return (
            f"{self.middle:.{digits}f}{unit} (95 %: {self.low:.{digits}f} to "
            f"{self.high:.{digits}f}, {self.pairs} pairs)"
        )


def interval(values: Sequence[float]) -> Interval:
    """The median of some values and its interval.

    Raises:
        ValueError: There are fewer than `LEAST`.
    """
    if len(values) < LEAST:
        raise ValueError(f"{len(values)} values; a median with an interval takes {LEAST}")
    ordered = sorted(values)
    count = len(ordered)
    below = max(0, int(count / 2 - 0.98 * sqrt(count)))
    return Interval(median(ordered), ordered[below], ordered[count - 1 - below], count)


def ratio_of_sums(values: Sequence[float], others: Sequence[float], draws: int = 2000) -> Interval:
    """The sum of some values by that of others, pair by pair, with its interval.

    By the bootstrap over the pairs: what happens in few of them counts as often as it does, which a
    median over them would not show.

    Raises:
        ValueError: There are fewer than `LEAST` pairs.
    """
    if len(values) < LEAST:
        raise ValueError(f"{len(values)} pairs; an interval takes {LEAST}")
    pairs = list(zip(values, others, strict=True))
    draw = random.Random(0)
    ratios = []
    for _ in range(draws):
        some = draw.choices(pairs, k=len(pairs))
        ratios.append(sum(a for a, _ in some) / sum(b for _, b in some))
    ratios.sort()
    whole = sum(values) / sum(others)
    return Interval(whole, ratios[draws // 40], ratios[-1 - draws // 40], len(pairs))


class Verdicts:
    """Collects what was measured, and what of it cannot be believed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def tell(
        self,
        name: str,
        found: Interval,
        unit: str,
        *,
        digits: int = 1,
        widest: float,
        most: float | None = None,
    ) -> None:
        """Print a line; note an interval too wide to tell, and a bar that is missed for sure.

        Args:
            name: What was measured.
            found: Its interval.
            unit: Of the values, with a blank before it.
            digits: Digits after the point.
            widest: Half the width that an interval may have to say anything.
            most: The bar, if there is one.
        """
        bar = ""
        if found.half > widest:
            bar = f"  TOO WIDE TO TELL (allowed: {widest:.{digits}f} either way)"
        elif most is not None:
            met = found.middle <= most
            sure = found.high <= most or found.low > most
            bar = f"  bar {most:g}: {'met' if met else 'MISSED'}{'' if sure else ', not for sure'}"
        print(f"{name}: {found.text(unit, digits)}{bar}", flush=True)
        if found.half > widest or (most is not None and found.low > most):
            self.failed.append(name)

    def status(self) -> int:
        """The exit status: 1 if anything is too wide, or misses its bar beyond doubt."""
        if self.failed:
            print(f"not met, or not to be told: {'; '.join(self.failed)}")
        return 1 if self.failed else 0
