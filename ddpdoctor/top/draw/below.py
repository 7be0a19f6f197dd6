"""What there is room for below the board: findings, what the ranks do, GPUs, charts, output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ddpdoctor.core import units
from ddpdoctor.render.lines import Line, columns, fitted
from ddpdoctor.top.draw import bars, panels, rank
from ddpdoctor.top.draw.marks import Marks
from ddpdoctor.top.draw.scene import Scene
from ddpdoctor.top.headline import ordered
from ddpdoctor.top.history import Point
from ddpdoctor.top.snapshot import Times

PANE = 58
"""Columns from which on there is one pane more beside the others."""
GAP = 3

LEAST, MOST = 6, 20
"""Lines of a chart, its title among them."""
TALL = 30
"""Lines from which on the worst finding is shown with its evidence and its fix."""
ENOUGH = 4
"""Points from which a chart says something."""

_Section = list[Line]
_Chart = Callable[[int], _Section]
"""Draws a chart in so many lines."""


def draw(scene: Scene, height: int) -> list[Line]:
    """In as many panes beside each other as fit, at most ``height`` lines."""
    panes = max(1, min(3, scene.room // PANE)) if height >= 8 else 1
    width = (scene.room - GAP * (panes - 1)) // panes
    last = scene.room - (width + GAP) * (panes - 1)
    subject = _subject(scene, width)
    sides = _sides(subject, panes - 1, height) if panes > 1 else ()
    if not sides:
        sections = _worded(scene, height)
        spare = height - sum(len(section) + 1 for section in sections)
        if spare >= LEAST and scene.room >= 50:
            sections += [each(min(spare, MOST)) for each in _charts(subject)[:1]]
        return _stacked(sections, height)
    words = _stacked(_worded(replace(scene, room=last), height), height)
    return _beside([*((side, width) for side in sides), (words, last)])


def charts_alone(scene: Scene, height: int) -> list[Line]:
    """The charts of the selected rank."""
    charts = _charts(_subject(scene, scene.room))
    return _pane(charts[: max(1, (height + 1) // (LEAST + 1))], height)


@lru_cache(maxsize=4)
def _sides(subject: _Subject, most: int, height: int) -> tuple[list[Line], ...]:
    """The panes of charts, which are drawn again when there is a point more."""
    charts = _charts(subject)
    half = (len(charts) + 1) // 2 if most > 1 else len(charts)
    return tuple(_pane(side, height) for side in (charts[:half], charts[half:]) if side)


def _pane(charts: Sequence[_Chart], height: int) -> list[Line]:
    """Charts one below the other that share the height."""
    count = max(1, min(len(charts), (height + 1) // (LEAST + 1)))
    each = min(MOST, (height + 1) // count - 1)
    return _stacked([draw(each) for draw in charts[:count]], height)


def _stacked(sections: Sequence[_Section], height: int) -> list[Line]:
    """Sections one below the other, a line between them, as far as they go."""
    lines: list[Line] = []
    for section in sections:
        if height - len(lines) < 2 + bool(lines):
            continue
        lines += [()] if lines else []
        lines += section[: height - len(lines)]
    return lines


def _beside(panes: Sequence[tuple[list[Line], int]]) -> list[Line]:
    count = max(len(lines) for lines, _ in panes)
    rows = []
    for number in range(count):
        row: Line = ()
        for lines, width in panes:
            gap: Line = ((" " * GAP, ""),) if row else ()
            line = lines[number] if number < len(lines) else ()
            row = (*row, *gap, *fitted(line, width))
        rows.append(row)
    return rows


# -- words


def _worded(scene: Scene, height: int) -> list[_Section]:
    """What is said in words, each section with its title."""
    snapshot = scene.snapshot
    sections: list[_Section] = []
    most = max(height // 4, 1)
    found = ordered(snapshot.findings)
    if found:
        lines = [panels.finding_line(each, scene, scene.room) for each in found[:most]]
        if height >= TALL:
            lines[1:1] = panels.opened(found[0], scene.room)[: height // 3]
        sections.append([((f"findings: {len(found)} (f)", "dim"),), *lines])
    groups = rank.groups(snapshot.ranks) if snapshot.live else []
    if groups:
        lines = [rank.group_line(group, scene) for group in groups[:most]]
        if len(groups) > most:
            more = f"{scene.marks.ellipsis} {len(groups) - most} more groups"
            lines.append(((more, "dim"),))
        sections.append([(("what the ranks do (d)", "dim"),), *lines])
    if scene.material.outlier is not None:
        sections.append(panels.outlier(scene)[: max(height // 3, 6)])
    if snapshot.gpus and height >= 24:
        gpus = panels.gpus(scene)
        sections.append(gpus[: max(height // 3, 6)])
    row, output, whose = scene.row, snapshot.output, "the job"
    if row is not None and row.output:
        output, whose = row.output, f"rank {row.rank}"
    if output:
        lines = [((text, ""),) for text in output[-max(height // 3, 2) :]]
        sections.append([((f"last output of {whose} (stderr)", "dim"),), *lines])
    return sections


# -- charts


@dataclass(frozen=True)
class _Subject:
    """All that the charts depend on."""

    points: tuple[Point, ...]
    rank: int | None
    several: bool
    """Whether there are several ranks."""
    memory: int | None
    """Bytes of the rank's GPU."""
    watts: float | None
    """What all GPUs may draw."""
    room: int
    marks: Marks

    @property
    def span(self) -> str:
        """How much time they show."""
        return f"over {units.duration(self.points[-1].time - self.points[0].time)}"


def _subject(scene: Scene, room: int) -> _Subject:
    row = scene.row
    return _Subject(
        scene.material.points,
        None if row is None else row.rank,
        len(scene.snapshot.ranks) > 1,
        None if row is None or row.gpu is None else row.gpu.memory_total,
        sum(gpu.power_limit or 0.0 for gpu in scene.snapshot.gpus) or None,
        room,
        scene.marks,
    )


def _charts(subject: _Subject) -> list[_Chart]:
    """The run over time: steps by phase of a rank and of the median one, skew, loss and others."""
    return _steps(subject) + _numbers(subject) if len(subject.points) >= ENOUGH else []


def _steps(subject: _Subject) -> list[_Chart]:
    rank, points = subject.rank, subject.points
    series = []
    if rank is not None:
        own = [point.times[rank] for point in points if rank in point.times]
        series.append((f"step of rank {rank}", own))
    if subject.several:
        usual = [point.median for point in points if point.median is not None]
        series.append(("step of the median rank", usual))
    series = [(name, steps) for name, steps in series if len(steps) >= ENOUGH]
    top = bars.axis([times.total for _, steps in series for times in steps])
    label = units.time(top)

    def chart(name: str, steps: Sequence[Times]) -> _Chart:
        def draw(height: int) -> _Section:
            size = subject.room - columns(label) - 1, height - 1
            title = f"{name}, {subject.span}"
            return bars.framed(title, label, bars.stacks(steps, top, size, subject.marks))

        return draw

    return [chart(name, steps) for name, steps in series]


def _numbers(subject: _Subject) -> list[_Chart]:
    points = subject.points
    number = -1 if subject.rank is None else subject.rank
    found: list[tuple[str, list[float | None], float | None, Callable[[float], str]]] = [
        ("skew, slowest to median", [each.skew for each in points], None, _times),
        ("loss", [each.loss for each in points], None, lambda value: f"{value:.3g}"),
        (
            f"memory of rank {number}",
            [each.memory.get(number) for each in points],
            subject.memory,
            lambda value: units.size(value),
        ),
        (
            "power of all GPUs",
            [each.power for each in points],
            subject.watts,
            lambda value: f"{units.figures(value)} W",
        ),
    ]
    return [_chart(subject, *each) for each in found if _known(each[1]) >= ENOUGH]


def _known(values: Sequence[float | None]) -> int:
    return sum(value is not None for value in values)


def _times(value: float) -> str:
    return f"{value:.3g}x"


def _chart(
    subject: _Subject,
    name: str,
    values: Sequence[float | None],
    most: float | None,
    shown: Callable[[float], str],
) -> _Chart:
    def draw(height: int) -> _Section:
        known = [value for value in values if value is not None]
        top = most or bars.end(max(known))
        label = shown(top)
        size = subject.room - columns(label) - 1, height - 1
        title = f"{name}, now {shown(known[-1])}, {subject.span}"
        return bars.framed(title, label, bars.numbers(values, top, size, subject.marks))

    return draw
