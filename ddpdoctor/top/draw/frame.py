"""A whole screen: from a snapshot and a view to lines, for any size of terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ddpdoctor.render.lines import Line, cleaned, columns, fitted
from ddpdoctor.top.draw import below, board, panels, rank, status
from ddpdoctor.top.draw.marks import marks_for
from ddpdoctor.top.draw.scene import Material, Scene
from ddpdoctor.top.snapshot import RankRow, Snapshot
from ddpdoctor.top.view import View

LEAST_BELOW = 14
"""Lines that a board which is longer than the screen leaves to what is below it, on a tall one."""
TALL = 40

TITLES = {
    "help": "keys",
    "findings": "findings",
    "stacks": "what the ranks do",
    "environment": "environment",
    "attach": "attach a debugger",
    "runs": "live runs",
    "signal": "send a signal",
}


@dataclass(frozen=True)
class Frame:
    """A screen, and what its lines are about."""

    lines: tuple[Line, ...]
    ranks: Mapping[int, int] = field(default_factory=dict)
    """The rank of a line."""
    entries: Mapping[int, int] = field(default_factory=dict)
    """The entry of a panel's list of a line."""
    visible: frozenset[int] | None = None
    """The ranks that are in sight; None if that is no matter here."""
    top: int = 0
    """The first row of the board in sight."""
    item: int = 0
    """How far the panel is scrolled, once its end is in sight."""

    def below(self, lines: Sequence[Line]) -> Frame:
        """The same, below other lines."""
        return replace(
            self,
            lines=(*lines, *self.lines),
            ranks={line + len(lines): rank for line, rank in self.ranks.items()},
            entries={line + len(lines): entry for line, entry in self.entries.items()},
        )


def draw(
    snapshot: Snapshot, view: View, room: int, height: int, material: Material | None = None
) -> Frame:
    """The screen: exactly ``height`` lines of exactly ``room`` columns."""
    if room <= 0 or height <= 0:
        return Frame(())
    scene = Scene(
        snapshot, view, room, marks_for(view.ascii_only, view.colour), material or Material()
    )
    # The headline is never cut where a few ranks fit below it all the same.
    head = status.verdict(scene, 1 if height < 10 else height - 9)
    if height >= 10 and snapshot.kind != "machine":
        head.insert(0, status.header(scene))
    foot: list[Line] = []
    message = status.message(scene)
    if message is not None and height >= 4:
        foot.append(message)
    if height >= 3:
        foot.append(status.status(scene))
    if view.keys and (height >= 8 or view.typing):
        foot.append(status.keys(scene))
    body = _body(scene, max(height - len(head) - len(foot), 0)).below(head)
    lines = [*body.lines, *[()] * (height - len(body.lines) - len(foot)), *foot]
    exact = tuple(_exact(line, view.ascii_only, room) for line in lines[:height])
    return replace(body, lines=exact)


@lru_cache(maxsize=256)
def _exact(line: Line, ascii_only: bool, room: int) -> Line:
    """A line of exactly so many columns. Most lines of a screen are those of the one before."""
    return fitted(cleaned(line, ascii_only), room)


def _body(scene: Scene, height: int) -> Frame:
    view, ranks = scene.view, scene.snapshot.ranks
    if view.panel == "signal":
        return _signal(scene, height)
    if view.panel:
        return _panel(scene, height)
    if not ranks and scene.snapshot.kind == "machine":
        return Frame(tuple(panels.machine(scene, height)))
    if view.expanded and scene.row is not None:
        return _expanded(scene, scene.row, height)
    wanted = board.lines_of(scene)
    space = height if wanted <= height or height < TALL else height - LEAST_BELOW
    drawn = board.draw(scene, min(space, wanted))
    left = height - len(drawn.lines) - 1
    shown = below.draw(scene, left) if left >= 2 else []
    return _with_board(drawn, scene, [(), *shown] if shown else [])


def _with_board(drawn: board.Drawn, scene: Scene, below: Sequence[Line], item: int = 0) -> Frame:
    seen = {*drawn.ranks.values(), *([scene.row.rank] if scene.row is not None else [])}
    return Frame((*drawn.lines, *below), drawn.ranks, {}, frozenset(seen), drawn.top, item)


def _expanded(scene: Scene, row: RankRow, height: int) -> Frame:
    text = rank.full(row, scene)
    wanted = board.lines_of(scene)
    least = min(wanted, max(height // 3, 5))
    space = max(least, height - len(text)) if height >= 12 else 0
    drawn = board.draw(scene, min(space, wanted))
    left = height - len(drawn.lines)
    item = max(0, min(scene.view.item, len(text) - left))
    shown = text[item : item + left]
    spare = left - len(shown) - 1
    if spare >= 5 and scene.room >= 60:
        shown += [(), *below.charts_alone(scene, spare)]
    return _with_board(drawn, scene, shown, item)


def _panel(scene: Scene, height: int) -> Frame:
    if height <= 0:
        return Frame(())
    view = scene.view
    title = TITLES[view.panel]
    if view.panel == "stacks" and not view.everyone and scene.row is not None:
        title = f"what rank {scene.row.rank} does"
    space = height - 1 if height >= 3 else height
    item = view.item
    if view.panel in ("findings", "runs"):
        draw_list = panels.findings if view.panel == "findings" else panels.choices
        listed = draw_list(scene, space)
    else:
        lines = panels.text(scene)
        item = max(0, min(item, len(lines) - space))
        below = len(lines) - item - space
        listed = panels.Listed(lines[item : item + space])
        if below > 0:
            more = f"{scene.marks.ellipsis} {below + 1} more lines (j)"
            listed.lines[-1] = ((more, "dim"),)
    head = [_title(f"{title} (esc: back)", scene)] if space < height else []
    drawn = Frame(tuple(listed.lines), {}, listed.entries, None, view.top, item).below(head)
    return replace(drawn, lines=drawn.lines[:height])


def _signal(scene: Scene, height: int) -> Frame:
    """The question, below as much of the board as there is room for."""
    space = height - len(scene.material.asked) - 1
    drawn = board.draw(scene, space if space >= 4 else 0)
    left = height - len(drawn.lines)
    title = [_title(f"{TITLES['signal']} (esc: no)", scene)] if left > 3 else []
    listed = panels.choices(scene, left - len(title))
    frame = Frame(tuple(listed.lines), {}, listed.entries, None, drawn.top)
    return replace(frame.below([*drawn.lines, *title]), ranks=drawn.ranks)


def _title(text: str, scene: Scene) -> Line:
    if columns(text) + 4 <= scene.room:
        return scene.rule(text)
    text = f"{text.partition(' (')[0]} "
    return ((text + scene.marks.rule * max(scene.room - columns(text), 0), "bold"),)
