"""What the keys do to the view, as far as that needs nothing but the snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ddpdoctor.top import board
from ddpdoctor.top.frame import chosen
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.top.view import View

Action = Callable[[View, Snapshot], View]


def move(view: View, snapshot: Snapshot, by: int) -> View:
    """The selection, or what is scrolled, ``by`` lines further down."""
    if view.panel == "findings":
        last = max(len(snapshot.findings) - 1, 0)
        return replace(view, item=max(0, min(view.item + by, last)), opened=False)
    if view.panel or view.expanded:
        return replace(view, item=max(0, view.item + by))
    ranks = board.order(snapshot, view)
    if not ranks:
        return view
    if view.cursor in ranks:
        at = ranks.index(view.cursor) + by
    else:
        at = by - 1 if by > 0 else len(ranks) + by
    return replace(view, cursor=ranks[max(0, min(at, len(ranks) - 1))])


def open_(view: View, snapshot: Snapshot) -> View:
    """The selected thing in full, or closed again."""
    if view.panel == "findings":
        return replace(view, opened=not view.opened)
    if view.panel:
        return view
    row = chosen(snapshot, view)
    if row is None:
        return view
    return replace(view, expanded=not view.expanded, cursor=row.rank, item=0)


def back_out(view: View, snapshot: Snapshot) -> View:
    """One thing less: the open finding, the panel, the expanded rank, the filter, the selection."""
    if view.opened:
        return replace(view, opened=False)
    if view.panel:
        return replace(view, panel="", item=0)
    if view.expanded:
        return replace(view, expanded=False, item=0)
    if view.filter:
        return view.typed("")
    return replace(view, cursor=None, top=0)


def stacks(view: View, snapshot: Snapshot) -> View:
    """All ranks; then the selected one; then the board again."""
    if view.panel != "stacks":
        return replace(view.shown("stacks"), everyone=True)
    if view.everyone and chosen(snapshot, view) is not None:
        return replace(view, everyone=False, item=0)
    return view.shown("stacks")


PURE: dict[str, Action] = {
    "help": lambda view, _: view.shown("help"),
    "findings": lambda view, _: view.shown("findings"),
    "environment": lambda view, _: view.shown("environment"),
    "stacks": stacks,
    "sort": lambda view, _: view.next_sort(),
    "turn": lambda view, _: view.turned(),
    "filter": lambda view, _: replace(view, typing=True, panel=""),
    "nodes": lambda view, _: replace(view, grouped=not view.grouped, top=0),
    "down": lambda view, snapshot: move(view, snapshot, 1),
    "up": lambda view, snapshot: move(view, snapshot, -1),
    "page down": lambda view, snapshot: move(view, snapshot, 10),
    "page up": lambda view, snapshot: move(view, snapshot, -10),
    "first": lambda view, snapshot: move(view, snapshot, -1_000_000),
    "last": lambda view, snapshot: move(view, snapshot, 1_000_000),
    "open": open_,
    "escape": back_out,
}
"""The keys that change nothing but the view."""

_SAYS: dict[str, Callable[[View], str]] = {
    "sort": lambda view: f"sorted by {view.sort}",
    "turn": lambda view: f"sorted by {view.sort}" + (", reversed" if view.reverse else ""),
    "nodes": lambda view: "grouped by node" if view.grouped else "not grouped",
}


def act(view: View, snapshot: Snapshot, name: str) -> View:
    """The view after an action of `PURE`."""
    after = PURE[name](replace(view, message=""), snapshot)
    return replace(after, message=_SAYS[name](after)) if name in _SAYS else after


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
