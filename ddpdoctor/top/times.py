"""Means over steps of one rank, medians over ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from ddpdoctor.analysis.pace import WARM_UP, own_time
from ddpdoctor.run.status import Parts
from ddpdoctor.top.snapshot import PHASES, RankRow, Times

_PARTS = attrgetter(*PHASES)

WINDOW = 16
"""Steps of a rank that its means are taken of."""


def middle(values: Iterable[float]) -> float:
    """The median."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def of_steps(steps: Sequence[Parts]) -> Times | None:
    """Means of steps, of those that were split if any was; None without steps.

    Means, since medians hide what is in every second step.
    """
    return _mean([parts for parts in steps if parts.split] or steps, True)


def unsplit(steps: Sequence[Parts]) -> Times | None:
    """Means of steps with the wait within the backward, as :func:`compared` needs them."""
    return _mean(steps, False)


def _mean(steps: Sequence[Parts], apart: bool) -> Times | None:
    if not steps:
        return None
    _, *columns, _, _, _ = zip(*steps, strict=True)
    data, forward, backward, optimizer, other, wait = (
        sum(column) / len(steps) / 1e9 for column in columns
    )
    if not apart:
        backward, wait = backward + wait, 0.0
    total = data + forward + backward + optimizer + other + wait
    lacked = sum(map(_lacked, steps)) / len(steps) / 1e9
    split = apart and steps[0].split
    return Times(data, forward, backward, optimizer, other, wait, total, split, lacked)


def compared(rows: Sequence[RankRow], groups: Mapping[int, Sequence[int]]) -> list[RankRow]:
    """Ranks whose backwards end together, with what each of them waited in its own.

    What it takes longer than the shortest one, as in `ddpdoctor.run.waits`.

    Args:
        rows: The ranks; of those in groups the wait is within the backward.
        groups: By rank, the ranks that it reduces gradients with.
    """
    backwards: dict[Sequence[int], list[float]] = {}
    for row in rows:
        if row.rank in groups and row.times is not None:
            backwards.setdefault(groups[row.rank], []).append(row.times.backward)
    least = {group: min(each) for group, each in backwards.items() if len(each) > 1}
    return [_waited(row, least.get(groups.get(row.rank, ()))) for row in rows]


def _waited(row: RankRow, least: float | None) -> RankRow:
    if row.times is None or least is None:
        return row
    wait = row.times.backward - least
    return replace(row, times=replace(row.times, backward=least, wait=wait, split=True))


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

    def times(self, apart: bool) -> Times | None:
        """Their means; with the wait in its own column only if it is to be ``apart``."""
        if self._times is None and self._steps:
            self._times = of_steps(self._steps) if apart else unsplit(self._steps)
        return self._times
