"""The keys, and what those do that change nothing but the view.

They are plain letters, since editors that hold a terminal take Ctrl and F keys themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.top.view import SORTS, Panel, View, chosen, order


class Key(NamedTuple):
    """A key, what it does in a word and in a line, and how long it stays on a narrow screen."""

    keys: tuple[str, ...]
    """As textual names them."""
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
    Key(("space",), "space", "pause", "hold the picture; the job goes on", "pause", 80),
    Key(("comma",), ",", "back", "to the frame before; <: a tenth of them back", "back", 35),
    Key(("full_stop",), ".", "forth", "to the next frame; >: a tenth of them on", "forth", 34),
    Key(("a",), "a", "attach", "how to attach a debugger; w writes launch.json", "attach", 60),
    Key(("e",), "e", "env", "versions and launch settings", "environment", 50),
    Key(("r",), "r", "record", "write the frames to a file, or stop that", "record", 45),
    Key(("x",), "x", "signal", "send a signal to the job; asks first", "signal", 44),
)
"""All keys that do something, in the order of the help."""

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
"""What each key does, by its name."""

MOVES = {
    "down": 1,
    "up": -1,
    "page down": 10,
    "page up": -10,
    "first": -1_000_000,
    "last": 1_000_000,
}
"""By how many lines an action moves the selection."""

_Action = Callable[[View, Snapshot], View]


def _move(by: int) -> _Action:
    """The selection, or what is scrolled, ``by`` lines further down."""

    def moved(view: View, snapshot: Snapshot) -> View:
        if view.panel == "findings":
            last = max(len(snapshot.findings) - 1, 0)
            return replace(view, item=max(0, min(view.item + by, last)), opened=False)
        if view.panel or view.expanded:
            return replace(view, item=max(0, view.item + by))
        ranks = order(snapshot, view)
        if not ranks:
            return view
        if view.cursor in ranks:
            at = ranks.index(view.cursor) + by
        else:
            at = by - 1 if by > 0 else len(ranks) + by
        return replace(view, cursor=ranks[max(0, min(at, len(ranks) - 1))])

    return moved


def _show(panel: Panel) -> _Action:
    return lambda view, _: view.shown(panel)


def _open(view: View, snapshot: Snapshot) -> View:
    """The selected thing in full, or closed again."""
    if view.panel == "findings":
        return replace(view, opened=not view.opened)
    row = None if view.panel else chosen(snapshot, view)
    if row is None:
        return view
    return replace(view, expanded=not view.expanded, cursor=row.rank, item=0)


def _escape(view: View, snapshot: Snapshot) -> View:
    """One thing less: the open finding, the panel, the expanded rank, the filter, the selection."""
    if view.opened:
        return replace(view, opened=False)
    if view.panel:
        return replace(view, panel="", item=0)
    if view.expanded:
        return replace(view, expanded=False, item=0)
    return view.typed("") if view.filter else replace(view, cursor=None, top=0)


def _stacks(view: View, snapshot: Snapshot) -> View:
    """All ranks; then the selected one; then the board again."""
    if view.panel != "stacks":
        return replace(view.shown("stacks"), everyone=True)
    if view.everyone and chosen(snapshot, view) is not None:
        return replace(view, everyone=False, item=0)
    return view.shown("stacks")


def _sort(view: View, snapshot: Snapshot) -> View:
    sort = SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)]
    return replace(view, sort=sort, reverse=False, top=0, message=f"sorted by {sort}")


def _turn(view: View, snapshot: Snapshot) -> View:
    end = "" if view.reverse else ", reversed"
    return replace(view, reverse=not view.reverse, top=0, message=f"sorted by {view.sort}{end}")


def _group(view: View, snapshot: Snapshot) -> View:
    message = "not grouped" if view.grouped else "grouped by node"
    return replace(view, grouped=not view.grouped, top=0, message=message)


PURE: dict[str, _Action] = {
    "help": _show("help"),
    "findings": _show("findings"),
    "environment": _show("environment"),
    "stacks": _stacks,
    "sort": _sort,
    "turn": _turn,
    "filter": lambda view, _: replace(view.typed(""), typing=True, panel=""),
    "nodes": _group,
    "open": _open,
    "escape": _escape,
    **{name: _move(by) for name, by in MOVES.items()},
}
"""The actions that change nothing but the view."""


def act(view: View, snapshot: Snapshot, name: str) -> View:
    """The view after an action of `PURE`."""
    return PURE[name](replace(view, message=""), snapshot)


def typed(view: View, key: str, character: str | None) -> View:
    """The view after a key while the filter is being typed."""
    if key == "enter":
        return replace(view, typing=False)
    if key in ("escape", "ctrl+c"):
        return replace(view.typed(""), typing=False)
    if key in ("backspace", "ctrl+h"):
        return view.typed(view.filter[:-1]) if view.filter else replace(view, typing=False)
    if key == "ctrl+u":
        return view.typed("")
    if character is not None and character.isprintable():
        return view.typed((view.filter + character)[:60])
    return view
