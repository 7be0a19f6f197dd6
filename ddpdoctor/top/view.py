"""Define how snapshots are shown, and the keys that change that.

A `View` holds sort order, filter and selection. Every key creates a new one. Keys are plain
letters, since editors that hold a terminal take Ctrl and F keys themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ddpdoctor.core.formatting import is_rank_set, rank_set
from ddpdoctor.top.snapshot import PHASES, RankRow, Snapshot

Panel = Literal["", "help", "findings", "stacks", "environment", "attach", "runs", "signal"]

SORTS = (
    *("own", "rank", "step", "data", "forward", "backward", "optimizer", "wait"),
    *("memory", "utilization", "power"),
)
"""The sort orders of the board, in the order of the key."""


@dataclass(frozen=True)
class View:
    """The state of a viewer."""

    ascii_only: bool = False
    colour: bool = True
    readonly: bool = False
    keys: bool = True  # Whether there is a keyboard, so that a line shows the keys
    sort: str = "own"
    reverse: bool = False
    filter: str = ""
    typing: bool = False  # The filter is being typed
    cursor: int | None = None  # The selected rank
    top: int = 0  # The first row of the board that is drawn
    expanded: bool = False
    grouped: bool = False
    paused: bool = False
    recording: str = ""
    panel: Panel = ""
    item: int = 0  # The selected line of a panel, or its scroll position
    opened: bool = False  # The selected finding is open
    everyone: bool = True  # The panel shows all ranks rather than the selected one
    position: tuple[int, int] | None = None
    """Frame and number of frames, of a replay or of the frames kept."""
    message: str = ""  # The message of the last key
    trouble: str = ""  # Why there are no new frames

    def toggled(self, panel: Panel) -> View:
        """Open a panel, or close it if it is open."""
        opened: Panel = "" if panel == self.panel else panel
        return replace(self, panel=opened, item=0, opened=False)

    def filtered(self, text: str) -> View:
        """Set the filter."""
        return replace(self, filter=text, top=0)


_OF_TIMES = (*PHASES, "own", "total")
_OF_GPU = ("utilization", "power", "temperature")


def rank_value(row: RankRow, name: str) -> float | None:
    """Return a number of a rank by its name: of its `Times`, its `Gpu` or itself."""
    part = row.times if name in _OF_TIMES else row.gpu if name in _OF_GPU else row
    return None if part is None else getattr(part, name)


def selected_rows(snapshot: Snapshot, view: View) -> list[RankRow]:
    """Return the rows that pass the filter, sorted. Those without a number come last."""
    rows = [row for row in snapshot.ranks if not view.filter or matches_filter(row, view.filter)]
    if view.sort == "own":
        if view.reverse:
            return rows[::-1]
        # Keep this order. The blamed rank and those that do not run must be visible, however many
        # ranks there are.
        urgent = {"dead": 1, "stale": 2, "debugger": 2}
        blamed = snapshot.verdict.rank
        return sorted(rows, key=lambda row: row.rank != blamed and urgent.get(row.state, 3))
    ascending = (view.sort == "rank") != view.reverse

    def place(row: RankRow) -> tuple[bool, float]:
        value = rank_value(row, view.sort)
        if value is None or not math.isfinite(value):
            return True, 0.0
        return False, value if ascending else -value

    return sorted(rows, key=place)


def by_node(ranks: Sequence[RankRow]) -> dict[str, list[RankRow]]:
    """Group ranks by node, in the order in which the nodes first appear."""
    nodes: dict[str, list[RankRow]] = {}
    for row in ranks:
        nodes.setdefault(row.node, []).append(row)
    return nodes


def board_order(snapshot: Snapshot, view: View) -> list[int]:
    """Return the ranks in the order of the board."""
    ranks = selected_rows(snapshot, view)
    if view.grouped:
        ranks = [row for members in by_node(ranks).values() for row in members]
    return [row.rank for row in ranks]


def matches_filter(row: RankRow, text: str) -> bool:
    """Return whether a row has all words of a filter: ``0-7`` are ranks, others match anything."""
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


def chosen_rank(snapshot: Snapshot, view: View) -> RankRow | None:
    """Return the rank that keys apply to: the selected, or else the blamed, or else the first."""
    by_rank = {row.rank: row for row in snapshot.ranks}
    for rank in (view.cursor, snapshot.verdict.rank):
        if rank is not None and rank in by_rank:
            return by_rank[rank]
    return next(iter(selected_rows(snapshot, view)), None)


class Key(NamedTuple):
    """A key, its effect in a word and in a sentence, and its priority on a narrow screen."""

    keys: tuple[str, ...]  # Textual's names for them
    shown: str
    short: str
    text: str
    action: str
    importance: int


_STACKS = "what the ranks do and their stacks, equal ones merged; again: the selected rank alone"

KEYS = (
    Key(("question_mark", "h"), "?", "help", "this help", "help", 100),
    Key(("q", "ctrl+c"), "q", "quit", "leave; the job goes on", "quit", 99),
    Key(("j", "down"), "j", "down", "to the next rank or line", "down", 40),
    Key(("k", "up"), "k", "up", "to the previous rank or line", "up", 39),
    Key(("enter",), "enter", "open", "the selected rank in full; in a list, its entry", "open", 90),
    Key(("f",), "f", "findings", "what is wrong with the job; enter shows the fix", "findings", 89),
    Key(("d",), "d", "stacks", _STACKS, "stacks", 88),
    Key(("s",), "s", "sort", "sort by the next column", "sort", 85),
    Key(("S", "upper_s"), "S", "turn", "sort the other way round", "turn", 30),
    Key(("slash",), "/", "filter", "ranks (0,2-7), node, state or phase", "filter", 84),
    Key(("t",), "t", "nodes", "group by node", "nodes", 70),
    Key(("space",), "space", "pause", "freeze the picture; the job goes on", "pause", 80),
    Key(("comma",), ",", "back", "to the frame before; <: a tenth of them back", "back", 35),
    Key(("full_stop",), ".", "forth", "to the next frame; >: a tenth of them on", "forth", 34),
    Key(("a",), "a", "attach", "how to attach a debugger; w writes launch.json", "attach", 60),
    Key(("e",), "e", "env", "versions and launch settings", "environment", 50),
    Key(("r",), "r", "record", "write the frames to a file, or stop that", "record", 45),
    Key(("x",), "x", "signal", "send a signal to the job; asks first", "signal", 44),
)
"""The keys of the help, in its order."""

ACTIONS = {name: key.action for key in KEYS for name in key.keys} | {
    "escape": "escape",
    "pagedown": "page down",
    "pageup": "page up",
    "home": "first",
    "end": "last",
    "less_than_sign": "far back",
    "greater_than_sign": "far forth",
    "w": "write",
    "c": "choose",
    "ctrl+z": "suspend",
    "ctrl+l": "redraw",
}
"""The action of each key."""

MOVES = {
    "down": 1,
    "up": -1,
    "page down": 10,
    "page up": -10,
    "first": -1_000_000,
    "last": 1_000_000,
}
"""The number of lines by which an action moves the selection."""

_ViewAction = Callable[[View, Snapshot], View]


def _move(by: int) -> _ViewAction:
    def moved(view: View, snapshot: Snapshot) -> View:
        if view.panel == "findings":
            last = max(len(snapshot.findings) - 1, 0)
            return replace(view, item=max(0, min(view.item + by, last)), opened=False)
        if view.panel or view.expanded:
            return replace(view, item=max(0, view.item + by))
        ranks = board_order(snapshot, view)
        if not ranks:
            return view
        if view.cursor in ranks:
            at = ranks.index(view.cursor) + by
        else:
            at = by - 1 if by > 0 else len(ranks) + by
        return replace(view, cursor=ranks[max(0, min(at, len(ranks) - 1))])

    return moved


def _open(view: View, snapshot: Snapshot) -> View:
    """Open the selected finding or rank, or close it again."""
    if view.panel == "findings":
        return replace(view, opened=not view.opened)
    row = None if view.panel else chosen_rank(snapshot, view)
    if row is None:
        return view
    return replace(view, expanded=not view.expanded, cursor=row.rank, item=0)


def _escape(view: View, snapshot: Snapshot) -> View:
    """Close one thing: the finding, the panel, the expanded rank, the filter, the selection."""
    if view.opened:
        return replace(view, opened=False)
    if view.panel:
        return replace(view, panel="", item=0)
    if view.expanded:
        return replace(view, expanded=False, item=0)
    return view.filtered("") if view.filter else replace(view, cursor=None, top=0)


def _stacks(view: View, snapshot: Snapshot) -> View:
    """Show all ranks, then the selected one, then the board again."""
    if view.panel != "stacks":
        return replace(view.toggled("stacks"), everyone=True)
    if view.everyone and chosen_rank(snapshot, view) is not None:
        return replace(view, everyone=False, item=0)
    return view.toggled("stacks")


def _sort(view: View, snapshot: Snapshot) -> View:
    sort = SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)]
    return replace(view, sort=sort, reverse=False, top=0, message=f"sorted by {sort}")


def _turn(view: View, snapshot: Snapshot) -> View:
    end = "" if view.reverse else ", reversed"
    return replace(view, reverse=not view.reverse, top=0, message=f"sorted by {view.sort}{end}")


def _group(view: View, snapshot: Snapshot) -> View:
    message = "not grouped" if view.grouped else "grouped by node"
    return replace(view, grouped=not view.grouped, top=0, message=message)


VIEW_ACTIONS: dict[str, _ViewAction] = {
    "help": lambda view, _: view.toggled("help"),
    "findings": lambda view, _: view.toggled("findings"),
    "environment": lambda view, _: view.toggled("environment"),
    "stacks": _stacks,
    "sort": _sort,
    "turn": _turn,
    "filter": lambda view, _: replace(view.filtered(""), typing=True, panel=""),
    "nodes": _group,
    "open": _open,
    "escape": _escape,
    **{name: _move(by) for name, by in MOVES.items()},
}
"""The actions that change only the view."""


def apply_action(view: View, snapshot: Snapshot, name: str) -> View:
    """Return the view after an action of `VIEW_ACTIONS`."""
    return VIEW_ACTIONS[name](replace(view, message=""), snapshot)


def type_into_filter(view: View, key: str, character: str | None) -> View:
    """Return the view after a key while the filter is being typed."""
    if key == "enter":
        return replace(view, typing=False)
    if key in ("escape", "ctrl+c"):
        return replace(view.filtered(""), typing=False)
    if key in ("backspace", "ctrl+h"):
        return view.filtered(view.filter[:-1]) if view.filter else replace(view, typing=False)
    if key == "ctrl+u":
        return view.filtered("")
    if character is not None and character.isprintable():
        return view.filtered((view.filter + character)[:60])
    return view
