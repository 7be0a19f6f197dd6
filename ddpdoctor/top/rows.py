"""Which ranks the board shows, and in which order."""

from __future__ import annotations

import math
from collections.abc import Callable

from ddpdoctor.core.ranks import is_rank_set, rank_set
from ddpdoctor.top.snapshot import RankRow, Snapshot
from ddpdoctor.top.view import View

_Key = Callable[[RankRow], float | None]


def _phase(name: str) -> _Key:
    return lambda row: None if row.times is None else float(getattr(row.times, name))


_KEYS: dict[str, _Key] = {
    "rank": lambda row: float(row.rank),
    "step": lambda row: row.step,
    **{name: _phase(name) for name in ("own", "data", "forward", "backward", "optimizer", "wait")},
    "memory": lambda row: memory(row),
    "utilization": lambda row: None if row.gpu is None else row.gpu.utilization,
    "power": lambda row: None if row.gpu is None else row.gpu.power,
}


def memory(row: RankRow) -> int | None:
    """The memory that matters to a rank: its GPU's, or its own where it has none."""
    if row.gpu is not None and row.gpu.memory_used is not None:
        return row.gpu.memory_used
    return row.reserved if row.reserved is not None else row.rss


_URGENT = ("dead", "stale", "debugger")


def selected(snapshot: Snapshot, view: View) -> list[RankRow]:
    """The rows that pass the filter, sorted as the view says; what has no number comes last."""
    rows = list(snapshot.ranks)
    if view.filter:
        rows = [row for row in rows if matches(row, view.filter)]
    if view.sort == "own":
        if view.reverse:
            return rows[::-1]
        # They come in this order. Who is blamed, or does not run, must be in sight, however many
        # ranks there are.
        blamed = snapshot.verdict.rank
        return sorted(
            rows,
            key=lambda row: (
                0 if row.rank == blamed else 1 if row.state == "dead" else 2
                if row.state in _URGENT else 3
            ),
        )  # fmt: skip
    key = _KEYS[view.sort]
    ascending = (view.sort == "rank") != view.reverse

    def place(row: RankRow) -> tuple[bool, float]:
        value = key(row)
        if value is None or not math.isfinite(value):
            return True, 0.0
        return False, value if ascending else -value

    return sorted(rows, key=place)


def matches(row: RankRow, text: str) -> bool:
    """Whether a row has all words of a filter: ``0-7`` are ranks, other words stand anywhere."""
    where = f"{row.node} {row.state} {row.phase} {row.collective} {row.site} {row.said}".lower()
    for word in text.lower().split():
        ranks = word.removeprefix("rank").strip(":=,-")
        if is_rank_set(ranks):
            try:
                if row.rank not in rank_set(ranks):
                    return False
            except ValueError:
                return False
        elif word not in where:
            return False
    return True
