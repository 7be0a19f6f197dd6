"""How a person looks at the snapshots: sort, filter, selection. Every key makes a new view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddpdoctor.core.ranks import is_rank_set, rank_set
from ddpdoctor.top.snapshot import PHASES, RankRow, Snapshot

Panel = Literal["", "help", "findings", "stacks", "environment", "attach", "runs", "signal"]

SORTS = (
    "own",
    "rank",
    "step",
    "data",
    "forward",
    "backward",
    "optimizer",
    "wait",
    "memory",
    "utilization",
    "power",
)
"""What the board can be sorted by, in the order of the key."""


@dataclass(frozen=True)
class View:
    """The state of a viewer."""

    ascii_only: bool = False
    colour: bool = True
    readonly: bool = False
    keys: bool = True
    """Whether there is a keyboard, so that a line says which keys there are."""
    sort: str = "own"
    reverse: bool = False
    filter: str = ""
    typing: bool = False
    """The filter is being typed."""
    cursor: int | None = None
    """The selected rank."""
    top: int = 0
    """The first row of the board that is drawn."""
    expanded: bool = False
    grouped: bool = False
    paused: bool = False
    recording: str = ""
    panel: Panel = ""
    item: int = 0
    """The selected line of a panel, or how far it is scrolled."""
    opened: bool = False
    """The selected finding is open."""
    everyone: bool = True
    """The panel is about all ranks rather than the selected one."""
    position: tuple[int, int] | None = None
    """Frame and number of frames, of a replay or of what can be scrubbed."""
    message: str = ""
    """What the last key has to say."""
    trouble: str = ""
    """Why there are no new frames, or no more of a panel."""

    def shown(self, panel: Panel) -> View:
        """With a panel, or without it if it is there already."""
        opened: Panel = "" if panel == self.panel else panel
        return replace(self, panel=opened, item=0, opened=False)

    def typed(self, text: str) -> View:
        """With another filter."""
        return replace(self, filter=text, top=0)


_OF_TIMES = (*PHASES, "own", "total")
_OF_GPU = ("utilization", "power", "temperature", "memory_share")


def number(row: RankRow, name: str) -> float | None:
    """A number of a rank by its name: of its `Times`, its `Gpu` or itself."""
    part = row.times if name in _OF_TIMES else row.gpu if name in _OF_GPU else row
    return None if part is None else getattr(part, name)


def selected(snapshot: Snapshot, view: View) -> list[RankRow]:
    """The rows that pass the filter, sorted as the view says; what has no number comes last."""
    rows = [row for row in snapshot.ranks if not view.filter or matches(row, view.filter)]
    if view.sort == "own":
        if view.reverse:
            return rows[::-1]
        # They come in this order. Who is blamed, or does not run, must be in sight, however many
        # ranks there are.
        urgent = {"dead": 1, "stale": 2, "debugger": 2}
        blamed = snapshot.verdict.rank
        return sorted(rows, key=lambda row: row.rank != blamed and urgent.get(row.state, 3))
    ascending = (view.sort == "rank") != view.reverse

    def place(row: RankRow) -> tuple[bool, float]:
        value = number(row, view.sort)
        if value is None or not math.isfinite(value):
            return True, 0.0
        return False, value if ascending else -value

    return sorted(rows, key=place)


def by_node(ranks: Sequence[RankRow]) -> dict[str, list[RankRow]]:
    """The ranks of each node, the nodes in the order in which they first appear."""
    nodes: dict[str, list[RankRow]] = {}
    for row in ranks:
        nodes.setdefault(row.node, []).append(row)
    return nodes


def order(snapshot: Snapshot, view: View) -> list[int]:
    """The ranks in the order of the board."""
    ranks = selected(snapshot, view)
    if view.grouped:
        ranks = [row for members in by_node(ranks).values() for row in members]
    return [row.rank for row in ranks]


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


def chosen(snapshot: Snapshot, view: View) -> RankRow | None:
    """The rank that the keys are about: the selected one, else the blamed one, else the first."""
    by_rank = {row.rank: row for row in snapshot.ranks}
    for rank in (view.cursor, snapshot.verdict.rank):
        if rank is not None and rank in by_rank:
            return by_rank[rank]
    return next(iter(selected(snapshot, view)), None)
