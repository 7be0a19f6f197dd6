"""Medians over steps, of one rank and of all."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

from ddpdoctor.analysis.pace import WARM_UP, own_time
from ddpdoctor.run.status import Parts
from ddpdoctor.top.snapshot import PHASES, RankRow, Times

_PARTS = attrgetter(*PHASES)

WINDOW = 16
"""Steps of a rank that its medians are taken of."""


def middle(values: Iterable[float]) -> float:
    """The median."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def of_steps(steps: Sequence[Parts]) -> Times | None:
    """Medians of steps, of those that were split if any was; None without steps."""
    split = [parts for parts in steps if parts.split]
    chosen = split or steps
    if not chosen:
        return None
    half = len(chosen) // 2
    _, *columns, _, _, _ = zip(*chosen, strict=True)
    data, forward, backward, optimizer, other, wait = (
        sorted(column)[half] / 1e9 for column in columns
    )
    # The sum of the medians, so that the parts always make up the whole.
    total = data + forward + backward + optimizer + other + wait
    lacked = sorted(map(_lacked, chosen))[half] / 1e9
    return Times(data, forward, backward, optimizer, other, wait, total, bool(split), lacked)


def steady(steps: list[Parts]) -> list[Parts]:
    """Steps without the first ones of a job, if there are any others."""
    later = [parts for parts in steps if parts.number >= WARM_UP]
    return later or steps


def of_ranks(times: Sequence[Times]) -> Times | None:
    """The median rank, part by part; None without any."""
    if not times:
        return None
    columns = zip(*map(_PARTS, times), strict=True)
    data, forward, backward, optimizer, other, wait = map(middle, columns)
    total = data + forward + backward + optimizer + other + wait
    split = all(each.split for each in times)
    lacked = middle(each.lacked for each in times)
    return Times(data, forward, backward, optimizer, other, wait, total, split, lacked)


def _lacked(parts: Parts) -> float:
    own = parts.total - parts.wait
    return own - own_time(own, parts.cpu, parts.waited)


def blamable(times: Times) -> float:
    """What a rank spent itself for certain: of a backward that was not split, nothing."""
    return times.own if times.split else times.own - times.backward


def skew(times: Sequence[Times]) -> float | None:
    """The largest own time, as a ratio to the median one; None for fewer than two ranks."""
    if len(times) < 2:
        return None
    owns = [blamable(each) for each in times]
    usual = middle(owns)
    return max(owns) / usual if usual > 0 else None


def ordered(rows: Iterable[RankRow], blamed: int | None) -> tuple[RankRow, ...]:
    """The blamed rank first, then by own time, at last ranks that run nothing.

    Ranks within five per cent of the median keep the order of their numbers, so that the rows of a
    healthy job stay where they are.
    """
    rows = tuple(rows)
    owns = {row.rank: blamable(row.times) for row in rows if row.times is not None}
    usual = middle(owns.values()) if owns else 0.0

    def key(row: RankRow) -> tuple[bool, bool, float, int]:
        own = owns.get(row.rank)
        idle = own is None or row.state in ("ended", "dead")
        own = own or 0.0
        return (
            row.rank != blamed,
            idle,
            -(usual if abs(own - usual) <= 0.05 * usual else own),
            row.rank,
        )

    return tuple(sorted(rows, key=key))


class Recent:
    """The newest steps of a rank, as its status page showed them."""

    __slots__ = ("_steps", "_times")

    def __init__(self, steps: Iterable[Parts] = ()) -> None:
        self._steps: deque[Parts] = deque(steps, maxlen=WINDOW)
        self._times: Times | None = None

    def saw(self, parts: Parts | None) -> None:
        """The page shows this step."""
        if parts is not None and (not self._steps or parts.number > self._steps[-1].number):
            self._steps.append(parts)
            self._times = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def times(self) -> Times | None:
        """Their medians."""
        if self._times is None and self._steps:
            self._times = of_steps(self._steps)
        return self._times
