"""A whole screen: from a snapshot and a view to lines, for any size of terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddpdoctor.core import units
from ddpdoctor.render.lines import Line, cleaned, columns, fitted
from ddpdoctor.top.draw import bars, board, panels, rank, status
from ddpdoctor.top.draw.marks import marks_for
from ddpdoctor.top.draw.scene import Material, Scene
from ddpdoctor.top.snapshot import RankRow, Snapshot
from ddpdoctor.top.view import View, selected

TALL = 40
"""Lines from which a full board leaves room for more than the board."""
WIDE = 140
"""Columns from which there are two columns below the board."""

LEAST_CHART, MOST_CHART = 4, 12
"""Lines of a chart, its title among them."""
ENOUGH = 10
"""Points from which a series says something."""

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
    scene = Scene(snapshot, view, room, marks_for(view.ascii_only), material or Material())
    head = status.verdict(scene, 1 if height < 12 else 2 if height < 30 else 3)
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
    exact = tuple(fitted(cleaned(line, view.ascii_only), room) for line in lines[:height])
    return replace(body, lines=exact)


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
    wanted = _board_lines(scene)
    space = height if wanted <= height or height < TALL else height - 14
    drawn = board.draw(scene, min(space, wanted))
    left = height - len(drawn.lines) - 1
    below = _below(scene, left) if left >= 2 else []
    return _with_board(drawn, scene, [(), *below] if below else [])


def _board_lines(scene: Scene) -> int:
    """The lines of a whole board: header and median; one where there is nothing else to say."""
    nodes = len({row.node for row in scene.snapshot.ranks}) if scene.view.grouped else 0
    return max(len(selected(scene.snapshot, scene.view)), 1) + nodes + 2


def _with_board(drawn: board.Drawn, scene: Scene, below: Sequence[Line], item: int = 0) -> Frame:
    seen = {*drawn.ranks.values(), *([scene.row.rank] if scene.row is not None else [])}
    return Frame((*drawn.lines, *below), drawn.ranks, {}, frozenset(seen), drawn.top, item)


def _expanded(scene: Scene, row: RankRow, height: int) -> Frame:
    text = rank.full(row, scene)
    wanted = _board_lines(scene)
    least = min(wanted, max(height // 3, 5))
    space = max(least, height - len(text)) if height >= 12 else 0
    drawn = board.draw(scene, min(space, wanted))
    left = height - len(drawn.lines)
    item = max(0, min(scene.view.item, len(text) - left))
    shown = text[item : item + left]
    spare = left - len(shown) - 1
    if spare >= 4 and scene.room >= 60:
        shown += [(), *_sections(_charts(scene, min(spare, 16)), spare)]
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


def _below(scene: Scene, height: int) -> list[Line]:
    """What there is room for below the board: findings, what the ranks do, series, output."""
    if scene.room >= WIDE and height >= 8:
        half = scene.room // 2 - 1
        left = _sections(_charts(replace(scene, room=half), height), height)
        right = _sections(_worded(replace(scene, room=scene.room - half - 2), height), height)
        return _beside(left, right, half) if left else right
    sections = _worded(scene, height)
    spare = height - sum(len(section) + 1 for section in sections)
    if spare >= 5 and scene.room >= 60:
        sections += _charts(scene, min(spare, 8))[:1]
    return _sections(sections, height)


def _sections(sections: Sequence[list[Line]], height: int) -> list[Line]:
    """Sections one below the other, a line between them, as far as they go."""
    lines: list[Line] = []
    for section in sections:
        if height - len(lines) < 2 + bool(lines):
            continue
        lines += [()] if lines else []
        lines += section[: height - len(lines)]
    return lines


def _beside(left: list[Line], right: list[Line], half: int) -> list[Line]:
    count = max(len(left), len(right))
    left, right = ([*lines, *[()] * (count - len(lines))] for lines in (left, right))
    return [
        (*fitted(one, half), ("  ", ""), *other) for one, other in zip(left, right, strict=True)
    ]


def _worded(scene: Scene, height: int) -> list[list[Line]]:
    """What is said in words, each section with its title."""
    sections: list[list[Line]] = []
    most = max(height // 3, 1)
    found = panels.ordered(scene.snapshot)
    if found:
        lines = [panels.finding_line(each, scene, scene.room) for each in found[:most]]
        sections.append([((f"findings: {len(found)} (f)", "dim"),), *lines])
    groups = rank.groups(scene.snapshot.ranks)
    if groups:
        lines = [rank.group_line(group, scene) for group in groups[:most]]
        if len(groups) > most:
            more = f"{scene.marks.ellipsis} {len(groups) - most} more groups"
            lines.append(((more, "dim"),))
        sections.append([(("what the ranks do (d)", "dim"),), *lines])
    row, output, whose = scene.row, scene.snapshot.output, "the job"
    if row is not None and row.output:
        output, whose = row.output, f"rank {row.rank}"
    if output:
        lines = [((text, ""),) for text in output[-max(height // 3, 2) :]]
        sections.append([((f"last output of {whose} (stderr)", "dim"),), *lines])
    return sections


def _charts(scene: Scene, height: int) -> list[list[Line]]:
    """The step time and the memory of the rank that matters, over time."""
    row = scene.row
    if row is None:
        return []
    past = scene.material.memory.get(row.rank, ())
    both = len(past) >= ENOUGH and height >= 2 * LEAST_CHART + 1
    size = scene.room, min((height - 1) // 2 if both else height, MOST_CHART)
    if size[1] < LEAST_CHART:
        return []
    charts = []
    if row.totals:
        title = f"step time of rank {row.rank}, the last {len(row.totals)} steps"
        top = bars.axis(row.totals)
        charts.append(bars.chart(title, row.totals, top, units.duration(top), size, scene.marks))
    if both:
        title = f"memory of rank {row.rank}, since the monitor started"
        most = (row.gpu.memory_total if row.gpu is not None else None) or max(past)
        charts.append(bars.chart(title, past, most, units.size(most), size, scene.marks))
    return charts
