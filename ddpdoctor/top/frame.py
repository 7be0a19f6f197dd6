"""A whole screen: from a snapshot and a view to lines, for any size of terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.top import board, expanded, rows, series, status
from ddpdoctor.top.groups import merged
from ddpdoctor.top.line import Line, cleaned, columns, fitted, shortened
from ddpdoctor.top.marks import Marks, marks_for
from ddpdoctor.top.panels import doing, environment, findings, machine
from ddpdoctor.top.panels import help as help_panel
from ddpdoctor.top.snapshot import RankRow, Snapshot
from ddpdoctor.top.view import View
from ddpdoctor.top.wrapping import wrapped

if TYPE_CHECKING:
    from ddpdoctor.top.taken import Taken

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


@dataclass(frozen=True)
class Material:
    """What a screen shows beside the snapshot: it was asked for, or was seen over time."""

    memory: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Memory of each rank while the monitor looked on, oldest first."""
    asked: tuple[str, ...] = ()
    """The lines that a key asked for: processes below a rank, how to attach, live runs."""
    taken: Taken | None = None
    """The stacks; None until they were taken."""


NOTHING = Material()


def draw(
    snapshot: Snapshot, view: View, room: int, height: int, material: Material = NOTHING
) -> Frame:
    """The screen: exactly ``height`` lines of exactly ``room`` columns."""
    marks = marks_for(view.ascii_only)
    if room <= 0 or height <= 0:
        return Frame(())
    head = status.verdict(snapshot, room, 1 if height < 12 else 2 if height < 30 else 3, marks)
    foot: list[Line] = []
    message = status.message(snapshot, view, room, marks)
    if message is not None and height >= 4:
        foot.append(message)
    if height >= 3:
        foot.append(status.status(snapshot, view, room, marks))
    if view.keys and (height >= 8 or view.typing):
        foot.append(status.keys(view, room))
    body = _body(snapshot, view, room, max(height - len(head) - len(foot), 0), marks, material)
    lines = [*head, *body.lines]
    lines += [()] * (height - len(lines) - len(foot))
    lines += foot
    shift = len(head)
    exact = tuple(fitted(cleaned(line, view.ascii_only), room) for line in lines[:height])
    return Frame(
        exact,
        {line + shift: rank for line, rank in body.ranks.items()},
        {line + shift: entry for line, entry in body.entries.items()},
        body.visible,
        body.top,
        body.item,
    )


def _body(
    snapshot: Snapshot, view: View, room: int, height: int, marks: Marks, material: Material
) -> Frame:
    if view.panel == "signal":
        return _signal(snapshot, view, room, height, marks, material)
    if view.panel:
        return _panel(snapshot, view, room, height, marks, material)
    if not snapshot.ranks and snapshot.kind == "machine":
        first = [machine.invitation(room, marks)] if height > 2 else []
        return Frame((*first, *machine.draw(snapshot, room, height - len(first), marks)))
    row = chosen(snapshot, view)
    if view.expanded and row is not None:
        return _expanded(snapshot, view, row, room, height, marks, material)
    wanted = _lines_wanted(snapshot, view)
    space = height if wanted <= height or height < TALL else height - 14
    drawn = board.draw(snapshot, view, room, min(space, wanted), marks)
    left = height - len(drawn.lines) - 1
    below = _below(snapshot, view, room, left, marks, material) if left >= 2 else []
    lines = (*drawn.lines, *([()] if below else []), *below)
    seen = frozenset(drawn.ranks.values()) | ({row.rank} if row is not None else frozenset())
    return Frame(lines, drawn.ranks, {}, seen, drawn.top)


def chosen(snapshot: Snapshot, view: View) -> RankRow | None:
    """The rank that the keys are about: the selected one, else the blamed one, else the first."""
    by_rank = {row.rank: row for row in snapshot.ranks}
    for rank in (view.cursor, snapshot.verdict.rank):
        if rank is not None and rank in by_rank:
            return by_rank[rank]
    return next(iter(rows.selected(snapshot, view)), None)


def _lines_wanted(snapshot: Snapshot, view: View) -> int:
    nodes = len({row.node for row in snapshot.ranks}) if view.grouped else 0
    # Header and median; and a line where there is nothing else to say.
    return max(len(rows.selected(snapshot, view)), 1) + nodes + 2


def _expanded(
    snapshot: Snapshot,
    view: View,
    row: RankRow,
    room: int,
    height: int,
    marks: Marks,
    material: Material,
) -> Frame:
    text = expanded.draw(snapshot, row, room, marks)
    wanted = _lines_wanted(snapshot, view)
    least = min(wanted, max(height // 3, 5))
    space = max(least, height - len(text)) if height >= 12 else 0
    drawn = board.draw(snapshot, view, room, min(space, wanted), marks)
    left = height - len(drawn.lines)
    item = max(0, min(view.item, len(text) - left))
    shown = text[item : item + left]
    spare = left - len(shown) - 1
    if spare >= 4 and room >= 60:
        below = _graphic(snapshot, view, room, min(spare, 16), marks, material)
        shown += [(), *_sections(below, spare)]
    seen = frozenset(drawn.ranks.values()) | {row.rank}
    return Frame((*drawn.lines, *shown), drawn.ranks, {}, seen, drawn.top, item)


def _panel(
    snapshot: Snapshot, view: View, room: int, height: int, marks: Marks, material: Material
) -> Frame:
    if height <= 0:
        return Frame(())
    row = chosen(snapshot, view)
    title = TITLES[view.panel]
    if view.panel == "stacks" and not view.everyone and row is not None:
        title = f"what rank {row.rank} does"
    entries: Mapping[int, int] = {}
    space = height - 1 if height >= 3 else height
    if view.panel == "findings":
        listed = findings.draw(snapshot, view.item, view.opened, room, space, marks)
        lines, entries = listed.lines, listed.entries
        item = view.item
    elif view.panel == "runs":
        listed = _choices(material.asked, view.item, room, space, marks)
        lines, entries, item = listed.lines, listed.entries, view.item
    else:
        lines = _text(snapshot, view, row, room, marks, material)
        item = max(0, min(view.item, len(lines) - space))
        below = len(lines) - item - space
        lines = lines[item : item + space]
        if below > 0:
            lines[-1] = ((f"{marks.ellipsis} {below + 1} more lines (j)", "dim"),)
    if space < height:
        lines = [_title(f"{title} (esc: back)", room, marks), *lines]
        entries = {line + 1: entry for line, entry in entries.items()}
    return Frame(tuple(lines[:height]), {}, entries, None, view.top, item)


def _signal(
    snapshot: Snapshot, view: View, room: int, height: int, marks: Marks, material: Material
) -> Frame:
    """The question, below as much of the board as there is room for."""
    space = height - len(material.asked) - 1
    drawn = board.draw(snapshot, view, room, space if space >= 4 else 0, marks)
    left = height - len(drawn.lines)
    title = [_title(f"{TITLES['signal']} (esc: no)", room, marks)] if left > 3 else []
    listed = _choices(material.asked, view.item, room, left - len(title), marks)
    start = len(drawn.lines) + len(title)
    return Frame(
        (*drawn.lines, *title, *listed.lines),
        drawn.ranks,
        {line + start: entry for line, entry in listed.entries.items()},
        None,
        drawn.top,
    )


def _text(
    snapshot: Snapshot, view: View, row: RankRow | None, room: int, marks: Marks, material: Material
) -> list[Line]:
    if view.panel == "help":
        return help_panel.draw(room, marks, view.readonly)
    if view.panel == "environment":
        return environment.draw(snapshot, room)
    if view.panel == "stacks":
        if view.everyone or row is None:
            lines, rank = doing.everyone(snapshot, room, marks), None
        else:
            lines, rank = doing.one(row, material.asked, room), row.rank
        # Here, and not at the top: a first paint has no use for it.
        from ddpdoctor.top.panels import stacks

        return [*lines, (), *stacks.draw(material.taken, rank, room, marks)]
    return [line for text in material.asked for line in wrapped(text, room)]


def _choices(
    asked: Sequence[str], item: int, room: int, height: int, marks: Marks
) -> findings.Listed:
    lines: list[Line] = []
    entries: dict[int, int] = {}
    first = max(0, min(item - height // 2, len(asked) - height))
    for number in range(first, min(len(asked), first + height)):
        sign = f"{marks.cursor} " if number == item else "  "
        text = shortened(sign + asked[number], room, marks.ellipsis)
        entries[len(lines)] = number
        lines.append(((text, "cursor" if number == item else ""),))
    return findings.Listed(lines, entries)


def _title(text: str, room: int, marks: Marks) -> Line:
    told = f"{marks.rule * 2} {text} "
    if columns(told) > room:
        told = f"{text.partition(' (')[0]} "
    return ((told + marks.rule * max(room - columns(told), 0), "bold"),)


def _below(
    snapshot: Snapshot, view: View, room: int, height: int, marks: Marks, material: Material
) -> list[Line]:
    """What there is room for below the board: findings, what the ranks do, series, output."""
    if room >= WIDE and height >= 8:
        half = room // 2 - 1
        left = _sections(_graphic(snapshot, view, half, height, marks, material), height)
        right = _sections(_worded(snapshot, view, room - half - 2, height, marks), height)
        if left:
            return _beside(left, right, half)
        return right
    sections = _worded(snapshot, view, room, height, marks)
    used = sum(len(section) for section in sections) + len(sections) - 1
    spare = height - used - 1
    if spare >= 5 and room >= 60:
        sections += _graphic(snapshot, view, room, min(spare, 8), marks, material)[:1]
    return _sections(sections, height)


def _sections(sections: Sequence[list[Line]], height: int) -> list[Line]:
    """Sections one below the other, a line between them, as far as they go."""
    lines: list[Line] = []
    for section in sections:
        if not section or height - len(lines) < 2 + bool(lines):
            continue
        lines += [()] if lines else []
        lines += section[: height - len(lines)]
    return lines


def _beside(left: Sequence[Line], right: Sequence[Line], half: int) -> list[Line]:
    count = max(len(left), len(right))
    pairs = zip(
        [*left, *[()] * (count - len(left))], [*right, *[()] * (count - len(right))], strict=True
    )
    return [(*fitted(one, half), ("  ", ""), *other) for one, other in pairs]


def _worded(
    snapshot: Snapshot, view: View, room: int, height: int, marks: Marks
) -> list[list[Line]]:
    sections: list[list[Line]] = []
    found = findings.ordered(snapshot)
    if found:
        most = max(min(len(found), height // 3), 1)
        lines: list[Line] = [((f"findings: {len(found)} (f)", "dim"),)]
        lines += [findings.one_line(each, snapshot.time, room, marks) for each in found[:most]]
        sections.append(lines)
    groups = merged(snapshot.ranks)
    if groups:
        most = max(min(len(groups), height // 3), 1)
        lines = [(("what the ranks do (d)", "dim"),)]
        lines += [doing.one_line(group, room, marks) for group in groups[:most]]
        if len(groups) > most:
            lines.append(((f"{marks.ellipsis} {len(groups) - most} more groups", "dim"),))
        sections.append(lines)
    row = chosen(snapshot, view)
    output = row.output if row is not None and row.output else snapshot.output
    if output:
        whose = f"rank {row.rank}" if row is not None and row.output else "the job"
        lines = [((f"last output of {whose} (stderr)", "dim"),)]
        lines += [((f"{text}", ""),) for text in output[-max(height // 3, 2) :]]
        sections.append(lines)
    return sections


def _graphic(
    snapshot: Snapshot, view: View, room: int, height: int, marks: Marks, material: Material
) -> list[list[Line]]:
    row = chosen(snapshot, view)
    if row is None:
        return []
    past = material.memory.get(row.rank, ())
    both = len(past) >= ENOUGH and height >= 2 * LEAST_CHART + 1
    each = min((height - 1) // 2 if both else height, MOST_CHART)
    if each < LEAST_CHART:
        return []
    found = [
        series.step_time(row, room, each, marks),
        series.memory(row, past, room, each, marks) if both else [],
    ]
    return [section for section in found if section]
