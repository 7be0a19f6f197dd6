"""Losses of several sizes over the samples seen, and whether one is beyond the noise of seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean

from ddpdoctor.core.formatting import count
from ddpdoctor.diagnose.parity.training import Point, Training

WINDOWS = 16
"""Windows in which losses are compared. Among 24 seeds of three small models, with two seeds as the
band, a third one was beyond it in at most 0.5 % of the trials. With eight windows it was in 8 %."""

TAIL = WINDOWS // 4  # Last windows, in all of which a loss has to be beyond the band
MARGIN = 0.5  # Distance to the band from which a loss is beyond it, in multiples of its width
DRAWN = 64  # Windows of a picture

Values = tuple[float | None, ...]


@dataclass(frozen=True)
class Curves:
    """Mean losses in equal windows of the samples that all sizes have seen.

    Attributes:
        samples: Samples at the end of each window.
        sizes: Losses by number of ranks. None where no step ended or the loss is not finite.
        low: Least loss of the seeds of the smallest size. Empty without seeds.
        high: Largest loss of these seeds.
        seeds: Number of these seeds, with the script's own.
    """

    samples: tuple[int, ...]
    sizes: dict[int, Values]
    low: Values = ()
    high: Values = ()
    seeds: int = 1


def curves_of(
    every: Sequence[Training], seeds: Sequence[Training] = (), windows: int = DRAWN
) -> Curves | None:
    """Return the curves of some sizes, the smallest first. None without losses of two sizes.

    Args:
        every: Each size.
        seeds: The smallest size with other seeds.
        windows: Number of windows, fewer for runs of fewer steps.
    """
    known = [each for each in every if each.losses and each.losses[-1].samples]
    if len(known) < 2:
        return None
    others = [each for each in seeds if each.losses]
    end = min(each.losses[-1].samples for each in (*known, *others))
    steps = min(sum(p.samples <= end for p in each.losses) for each in (*known, *others))
    number = min(windows, steps)
    sizes = {each.ranks: _means(each.losses, end, number) for each in known}
    low: Values = ()
    high: Values = ()
    if others and known[0] is every[0]:
        beside = [sizes[known[0].ranks], *(_means(each.losses, end, number) for each in others)]
        spans = list(zip(*beside, strict=True))
        low = tuple(min(_all(each), default=None) for each in spans)
        high = tuple(max(_all(each), default=None) for each in spans)
    ends = tuple(round(end * (place + 1) / number) for place in range(number))
    return Curves(ends, sizes, low, high, 1 + len(others) if low else 1)


def _means(points: Sequence[Point], end: int, number: int) -> Values:
    """Return the mean loss of each window."""
    found: list[list[float]] = [[] for _ in range(number)]
    for each in points:
        if each.samples <= end:
            found[max(0, -(-each.samples * number // end) - 1)].append(each.value)
    return tuple(mean(each) if each and all(map(isfinite, each)) else None for each in found)


def _all(values: Iterable[float | None]) -> list[float]:
    """Return the values. Empty if one is missing."""
    found = list(values)
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) else []


def beyond_noise(every: Sequence[Training], seeds: Sequence[Training]) -> Iterator[str]:
    """Yield a sentence for each larger size: whether its loss is within the noise of seeds."""
    curves = curves_of(every, seeds, WINDOWS)
    if curves is None or not curves.low:
        return
    base, *larger = curves.sizes
    low, high = _all(curves.low), _all(curves.high)
    if len(curves.samples) < WINDOWS or not low:
        yield (
            f"the losses of {WINDOWS} steps of each size, all of them finite, are needed to tell "
            "a difference from noise"
        )
        return
    width = max(b - a for a, b in zip(low[WINDOWS // 2 :], high[WINDOWS // 2 :], strict=True))
    if not width:
        yield (
            "the seeds changed no loss: the job draws from other generators than the shared ones, "
            "and noise is not known"
        )
        return
    for ranks in larger:
        values = _all(curves.sizes[ranks][-TAIL:])
        if not values:
            continue
        above = all(v > h + MARGIN * width for v, h in zip(values, high[-TAIL:], strict=True))
        below = all(v < b - MARGIN * width for v, b in zip(values, low[-TAIL:], strict=True))
        how = "higher than" if above else "lower than" if below else "within"
        yield (
            f"the loss of {count(ranks, 'rank')} after {curves.samples[-1]} samples is {how} what "
            f"{curves.seeds} seeds of {count(base, 'rank')} give: {mean(values):.4g}, and "
            f"{mean(low[-TAIL:]):.4g} to {mean(high[-TAIL:]):.4g}"
        )
