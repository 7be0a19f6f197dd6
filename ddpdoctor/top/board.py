"""The board: a line for each rank, in as many columns as there is room for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from ddpdoctor.top import bars, rows, units
from ddpdoctor.top.line import Line, Span, columns, fit, shortened
from ddpdoctor.top.marks import Marks
from ddpdoctor.top.snapshot import RankRow, Snapshot, Times
from ddpdoctor.top.view import View

NO_NUMBERS = ("dead", "ended", "starting", "debugger")
"""States in which a rank's own numbers are history, and words take their place."""

LEAST_TREND = 6
"""Columns below which own time over the last steps is not drawn."""
MOST_TREND = 60


@dataclass(frozen=True)
class Drawn:
    """Lines, and what each of them is about."""

    lines: tuple[Line, ...]
    ranks: dict[int, int] = field(default_factory=dict)
    """The rank that a line belongs to, by the line's number."""
    top: int = 0
    """The first row that was drawn, once the cursor is in sight."""


@dataclass(frozen=True)
class _Scale:
    """What all cells of a board share."""

    unit: units.TimeUnit
    top: float
    """The end of the axis."""
    marks: Marks
    gpu_width: int


@dataclass(frozen=True)
class _Column:
    """A column, and how soon it goes when there is no room: the least importance first."""

    name: str
    title: str
    width: int
    importance: int
    cell: Callable[[RankRow, _Scale], str]
    live: bool = True
    """Whether it says what the rank does, which words replace for one that does nothing."""
    left: bool = False
    typical: Callable[[Snapshot, _Scale], str] | None = None
    """The cell of the median row."""


def _time(name: str) -> Callable[[RankRow, _Scale], str]:
    return lambda row, scale: phase_cell(row.times, name, scale.unit)


def _typical(name: str) -> Callable[[Snapshot, _Scale], str]:
    return lambda snapshot, scale: phase_cell(snapshot.median, name, scale.unit)


def phase_cell(times: Times | None, name: str, unit: units.TimeUnit) -> str:
    """A phase's time; ``~`` where the wait for others is in it, not measured apart."""
    if times is None:
        return units.MISSING
    value = float(getattr(times, name))
    if times.split:
        return units.time_in(value, unit)
    if name == "wait":
        return units.MISSING if value <= 0 else f"~{units.time_in(value, unit)}"
    mixed = "~" if name in ("own", "backward") else ""
    return f"{mixed}{units.time_in(value, unit)}"


def place(row: RankRow, room: int, marks: Marks) -> str:
    """``node:gpu``, the node's name cut where need be: its end tells nodes apart."""
    index = row.gpu.index if row.gpu is not None else None
    suffix = "" if index is None else f":{index}"
    node = row.node.partition(".")[0] if not row.node.replace(".", "").isdigit() else row.node
    left = room - len(suffix)
    if columns(node) > left:
        node = node[-max(left, 0) :] if left > 0 else ""
    return node + suffix


def _memory(row: RankRow, scale: _Scale) -> str:
    return units.size(rows.memory(row))


def _memory_share(row: RankRow, scale: _Scale) -> str:
    if row.gpu is None or not row.gpu.memory_total or row.gpu.memory_used is None:
        return units.MISSING
    return units.percent(row.gpu.memory_used / row.gpu.memory_total)


_COLUMNS = (
    _Column("rank", "rank", 4, 100, lambda row, _: str(row.rank), live=False),
    _Column(
        "gpu",
        "gpu",
        7,
        40,
        lambda row, scale: place(row, scale.gpu_width, scale.marks),
        live=False,
        left=True,
    ),
    _Column(
        "step",
        "step",
        6,
        80,
        lambda row, _: units.MISSING if row.step is None else str(row.step),
        live=False,
    ),
    _Column("phase", "doing", 9, 15, lambda row, _: row.phase or units.MISSING, left=True),
    _Column("beat", "beat", 4, 12, lambda row, _: units.age(row.heartbeat)),
    _Column("own", "OWN", 5, 95, _time("own"), typical=_typical("own")),
    _Column("data", "data", 4, 66, _time("data"), typical=_typical("data")),
    _Column("forward", "fwd", 4, 62, _time("forward"), typical=_typical("forward")),
    _Column("backward", "bwd", 5, 64, _time("backward"), typical=_typical("backward")),
    _Column("optimizer", "opt", 4, 60, _time("optimizer"), typical=_typical("optimizer")),
    _Column("wait", "wait", 5, 90, _time("wait"), typical=_typical("wait")),
    _Column("memory", "mem", 4, 70, _memory),
    _Column("share", "mem%", 4, 14, _memory_share),
    _Column(
        "utilization",
        "util",
        4,
        72,
        lambda row, _: units.percent(None if row.gpu is None else row.gpu.utilization),
    ),
    _Column(
        "power",
        "watt",
        4,
        50,
        lambda row, _: units.watts(None if row.gpu is None else row.gpu.power),
    ),
    _Column(
        "temperature",
        "temp",
        4,
        13,
        lambda row, _: units.degrees(None if row.gpu is None else row.gpu.temperature),
    ),
    _Column("total", "total", 5, 11, _time("total"), typical=_typical("total")),
)
_SHORT = {"rank": "#", "gpu": ""}
"""Titles for columns that are narrower than their titles."""

_TREND = 55
"""The importance of the own time over the last steps."""

_GPU_COLUMNS = {"memory", "share", "utilization", "power", "temperature"}


@dataclass(frozen=True)
class _Shape:
    """The columns that fit, and what is left for the trend (0: none)."""

    columns: tuple[_Column, ...]
    trend: int


def _shape(room: int, ranks: Sequence[RankRow], gpu_width: int) -> _Shape:
    """The most important columns that fit; what no rank has is left out."""
    digits = max((len(str(row.rank)) for row in ranks), default=1)
    widths = {"rank": max(4 if room >= 40 else 2, digits), "gpu": gpu_width}
    widths["step"] = max(
        4, max((len(str(row.step)) for row in ranks if row.step is not None), default=4)
    )
    absent = set()
    if not any(row.gpu is not None for row in ranks):
        absent |= {"utilization", "power", "temperature", "share"}
    left = room - 2
    chosen: set[str] = set()
    wished: list[tuple[int, str, int]] = [
        (column.importance, column.name, widths.get(column.name, column.width))
        for column in _COLUMNS
        if column.name not in absent
    ]
    wished.append((_TREND, "trend", LEAST_TREND))
    # Beyond what eighty columns hold, the trend deserves room before the rarer columns do.
    wished.append((35, "more trend", 14))
    for _, name, width in sorted(wished, reverse=True):
        if left >= width + 1:
            left -= width + 1
            chosen.add(name)
        else:
            # A column that is less important must not take the place of one that had none.
            break
    taken = tuple(
        _with_width(column, widths.get(column.name, column.width))
        for column in _COLUMNS
        if column.name in chosen
    )
    trend = 0
    if "trend" in chosen:
        trend = min(MOST_TREND, left + LEAST_TREND + (15 if "more trend" in chosen else 0))
    return _Shape(taken, trend)


def _with_width(column: _Column, width: int) -> _Column:
    if column.width == width:
        return column
    return _Column(
        column.name, column.title, width, column.importance, column.cell, column.live, column.left,
        column.typical,
    )  # fmt: skip


def draw(snapshot: Snapshot, view: View, room: int, height: int, marks: Marks) -> Drawn:
    """The board in at most ``height`` lines of ``room`` columns: header, ranks, median."""
    ranks = rows.selected(snapshot, view)
    if height <= 0:
        return Drawn(())
    header_lines = 1 if height >= 3 else 0
    fits = height >= 5 or height - header_lines > len(ranks)
    median_lines = 1 if fits and snapshot.median is not None and len(ranks) > 1 else 0
    body = height - header_lines - median_lines
    entries = _by_node(ranks) if view.grouped else [_Entry(row=row) for row in ranks]
    first, count, tail = _window(entries, view, body)
    visible = [entry for entry in entries[first : first + count] if entry.row is not None]
    shown = [entry.row for entry in visible if entry.row is not None] or ranks[:1]
    gpu_width = _gpu_width(snapshot.ranks, room)
    shape = _shape(room, snapshot.ranks, gpu_width)
    totals = [row.times.total for row in snapshot.ranks if row.times is not None]
    owns = [own for row in shown for own in row.owns[-max(shape.trend, 1) :]]
    scale = _Scale(units.unit_for(max(totals, default=0.0)), bars.axis(owns), marks, gpu_width)
    lines: list[Line] = []
    about: dict[int, int] = {}
    if header_lines:
        lines.append(_header(shape, scale, view))
    for entry in entries[first : first + count]:
        if entry.row is not None:
            about[len(lines)] = entry.row.rank
            lines.append(_rank_line(entry.row, snapshot, view, shape, scale, room))
        else:
            if entry.ranks:
                about[len(lines)] = entry.ranks[0].rank
            lines.append(_node_line(entry, scale, room, view))
    rest = [entry.row for entry in entries[first + count :] if entry.row is not None]
    if tail:
        lines += _tail(rest, first, len(entries) - first - count, tail, shape, scale, snapshot)
    if not ranks:
        words = "no rank passes the filter" if view.filter else "no rank has started yet"
        lines.append(((f"  {words}", "dim"),))
    if median_lines:
        lines.append(_median_line(snapshot, shape, scale, room))
    return Drawn(tuple(lines[:height]), about, first)


def order(snapshot: Snapshot, view: View) -> list[int]:
    """The ranks in the order of the board."""
    ranks = rows.selected(snapshot, view)
    if not view.grouped:
        return [row.rank for row in ranks]
    return [entry.row.rank for entry in _by_node(ranks) if entry.row is not None]


@dataclass(frozen=True)
class _Entry:
    """A line of the board: a rank, or the head of a node."""

    row: RankRow | None = None
    node: str = ""
    ranks: tuple[RankRow, ...] = ()


def _by_node(ranks: Sequence[RankRow]) -> list[_Entry]:
    """The ranks below the heads of their nodes, in the order in which the nodes first appear."""
    nodes: dict[str, list[RankRow]] = {}
    for row in ranks:
        nodes.setdefault(row.node, []).append(row)
    entries: list[_Entry] = []
    for node, members in nodes.items():
        entries.append(_Entry(node=node, ranks=tuple(members)))
        entries += [_Entry(row=row) for row in members]
    return entries


def _window(entries: list[_Entry], view: View, body: int) -> tuple[int, int, int]:
    """First entry, number of entries, and the lines left for what is not shown."""
    if view.grouped and len(entries) > body:
        # Not all of them fit: the nodes alone, and below each as many of its worst as there is room
        # for.
        nodes = [entry for entry in entries if entry.row is None]
        share = max(0, (body - 1) // max(len(nodes), 1) - 1)
        kept: list[_Entry] = []
        for node in nodes:
            kept.append(node)
            kept += [
                _Entry(row=row)
                for number, row in enumerate(node.ranks)
                if number < share or row.rank == view.cursor
            ]
        entries[:] = kept
    if len(entries) <= body:
        return 0, len(entries), 0
    tail = 4 if body >= 12 else 1 if body >= 3 else 0
    count = max(body - tail, 1)
    first = min(view.top, len(entries) - count)
    if view.cursor is not None:
        at = next((n for n, e in enumerate(entries) if _is_cursor(e, view.cursor)), None)
        if at is not None:
            first = min(max(first, at - count + 1), at)
    return max(first, 0), count, tail


def _is_cursor(entry: _Entry, cursor: int) -> bool:
    return entry.row is not None and entry.row.rank == cursor


def _gpu_width(ranks: Sequence[RankRow], room: int) -> int:
    longest = max((columns(place(row, 99, _NO_MARKS)) for row in ranks), default=4)
    return max(3, min(longest, 8 if room < 100 else 12 if room < 140 else 20))


_NO_MARKS = Marks(True, " #", "#", "-", "", "-", "-", *[" "] * 11)


def _header(shape: _Shape, scale: _Scale, view: View) -> Line:
    spans: list[Span] = [("  ", "head")]
    for column in shape.columns:
        title = column.title
        sorted_by = column.name == view.sort
        text = title if len(title) <= column.width else _SHORT.get(title, title)[: column.width]
        text = text.ljust(column.width) if column.left else text.rjust(column.width)
        spans.append((" ", "head"))
        spans.append((text, "bold" if sorted_by else "head"))
    if shape.trend:
        end = f"{units.time_in(scale.top, scale.unit)} {scale.unit.name}" if scale.top else ""
        full = f"OWN, 0 to {end}" if end else "OWN"
        short = f"<{end}".replace(" ", "") if end else "OWN"
        title = full if len(full) <= shape.trend else short
        spans += [(" ", "head"), (shortened(title, shape.trend, "").ljust(shape.trend), "head")]
    return tuple(spans)


def _rank_line(
    row: RankRow, snapshot: Snapshot, view: View, shape: _Shape, scale: _Scale, room: int
) -> Line:
    marks = scale.marks
    blamed = row.rank == snapshot.verdict.rank
    chosen = row.rank == view.cursor
    style = {"dead": "error", "stale": "dim", "ended": "dim", "starting": "dim"}.get(row.state, "")
    sign = marks.state(row.state, blamed)
    sign_style = "error" if row.state == "dead" else "warning" if blamed else style or "info"
    if blamed and not style:
        style = "bold"
    cells = [(marks.cursor if chosen else " ", ""), (sign, sign_style)]
    used = 2
    words = _words(row, shape.trend)
    for column in shape.columns:
        if column.live and row.state in NO_NUMBERS and words:
            break
        cells.append((f" {_cell(column, column.cell(row, scale))}", style))
        used += column.width + 1
    if words:
        cells.append((f" {shortened(words, max(room - used - 1, 0), marks.ellipsis)}", style))
    elif shape.trend:
        cells.append((f" {bars.sparkline(row.owns, scale.top, shape.trend, marks)}", "bar"))
    if chosen:
        # Bars on a reversed ground would read as their opposite.
        trend = cells[-1:] if cells[-1][1] == "bar" else []
        text = "".join(text for text, _ in cells[: len(cells) - len(trend)])
        return ((text if trend else fit(text, room), "cursor"), *trend)
    return tuple(cells)


def _cell(column: _Column, text: str) -> str:
    text = fit(text, column.width) if columns(text) > column.width else text
    gap = " " * (column.width - columns(text))
    return text + gap if column.left else gap + text


def _words(row: RankRow, room: int) -> str:
    """What there is to say of a rank that does not simply run."""
    if row.state == "stale":
        short = f"stale {units.age(row.heartbeat)}"
        long = row.said or f"has not moved for {units.duration(row.heartbeat)}"
        return long if columns(long) <= room else short
    if row.state in NO_NUMBERS:
        usual = {"debugger": "in the debugger"}.get(row.state, row.state)
        if row.said and row.state == "dead" and not row.said.startswith("dead"):
            return f"dead: {row.said}"
        return row.said or usual
    return ""


def _node_line(entry: _Entry, scale: _Scale, room: int, view: View) -> Line:
    """A node in one line: how many ranks, who is the slowest, how it stands."""
    owns = [row.times.own for row in entry.ranks if row.times is not None]
    states: dict[str, int] = {}
    for row in entry.ranks:
        if row.state != "running":
            states[row.state] = states.get(row.state, 0) + 1
    watts = [row.gpu.power for row in entry.ranks if row.gpu and row.gpu.power is not None]
    used = [row.gpu.utilization for row in entry.ranks if row.gpu and row.gpu.utilization]
    unit = scale.unit
    parts = [f"{len(entry.ranks)} ranks" if len(entry.ranks) != 1 else "1 rank"]
    if owns:
        worst = max(
            (row for row in entry.ranks if row.times is not None),
            key=lambda row: row.times.own if row.times else 0.0,
        )
        parts.append(f"OWN {units.time_in(median(owns), unit)} {unit.name}")
        parts.append(f"most {units.time_in(max(owns), unit)} on rank {worst.rank}")
    if used:
        parts.append(f"util {units.percent(median(used))}")
    if watts:
        parts.append(f"{units.figures(sum(watts))} W")
    parts += [f"{count} {state}" for state, count in sorted(states.items())]
    name = entry.node or "node"
    text = f" {name}: " if room >= 40 else f" {name[-12:]}: "
    for number, part in enumerate(parts):
        more = part if number == 0 else f", {part}"
        if columns(text) + columns(more) > room:
            break
        text += more
    return ((shortened(text, room, scale.marks.ellipsis), "bold"),)


def _tail(
    rest: Sequence[RankRow],
    before: int,
    after: int,
    lines: int,
    shape: _Shape,
    scale: _Scale,
    snapshot: Snapshot,
) -> list[Line]:
    """What of the ranks beyond the board can be said in a few lines."""
    sign = scale.marks.ellipsis
    nodes = " nodes" if after and not rest else ""
    told = f"  {sign} {after} more{nodes}" if after else "  the last ones"
    if before:
        told += f", {before} above"
    result: list[Line] = [((told, "dim"),)]
    if lines >= 4 and rest:
        numbers = _Numbers(rest, scale)
        for share, name in ((0.9, "90%"), (0.5, "50%"), (0.1, "10%")):
            result.append(_quantile_line(numbers, share, name, shape))
    return result[:lines]


def _quantile_line(numbers: _Numbers, share: float, name: str, shape: _Shape) -> Line:
    """A row of quantiles of those that are not shown, each column for itself."""
    text = "  "
    for column in shape.columns:
        value = name if column.name == "rank" else numbers.shown(column.name, share)
        text += " " + _cell(column, value)
    return ((text, "dim"),)


class _Numbers:
    """The numbers of the ranks that are not shown, sorted once for all quantiles."""

    def __init__(self, rest: Sequence[RankRow], scale: _Scale) -> None:
        self._rest = rest
        self._unit = scale.unit
        self._times = [row.times for row in rest if row.times is not None]
        self._split = all(times.split for times in self._times)
        self._sorted: dict[str, list[float]] = {}

    def shown(self, name: str, share: float) -> str:
        """A quantile of a column, as the board shows its numbers; empty where it has none."""
        if name in _PHASES:
            if name == "wait" and not self._split:
                return units.MISSING
            mixed = "" if self._split or name not in ("own", "backward") else "~"
            number = self._quantile(name, share)
            return units.MISSING if number is None else mixed + units.time_in(number, self._unit)
        if name == "memory":
            number = self._quantile(name, share)
            return units.size(None if number is None else int(number))
        if name == "utilization":
            return units.percent(self._quantile(name, share))
        if name == "power":
            return units.watts(self._quantile(name, share))
        return ""

    def _quantile(self, name: str, share: float) -> float | None:
        if name not in self._sorted:
            values = (value for value in self._values(name) if value is not None)
            self._sorted[name] = sorted(value for value in values if math.isfinite(value))
        found = self._sorted[name]
        return found[min(len(found) - 1, int(share * len(found)))] if found else None

    def _values(self, name: str) -> Iterator[float | None]:
        if name in _PHASES:
            return (getattr(times, name) for times in self._times)
        if name == "memory":
            return (rows.memory(row) for row in self._rest)
        return (getattr(row.gpu, name) for row in self._rest if row.gpu is not None)


_PHASES = ("own", "data", "forward", "backward", "optimizer", "wait", "total")


def _median_line(snapshot: Snapshot, shape: _Shape, scale: _Scale, room: int) -> Line:
    """The median of all ranks, and how far the slowest is from it."""
    cells: list[Span] = []
    text, used = "  ", 2
    for column in shape.columns:
        value = column.typical(snapshot, scale) if column.typical is not None else ""
        if column.name == "rank":
            value = "med" if column.width >= 3 else "m"
        text += " " + _cell(column, value)
        used += column.width + 1
    cells.append((text, "info"))
    if snapshot.skew is not None:
        skew = f"skew {snapshot.skew:.2f}x"
        for words in (f"{skew}: the slowest rank to the median", skew, f"{snapshot.skew:.1f}x"):
            if len(words) + used + 1 <= room:
                cells.append((f" {words}", "info"))
                break
    return tuple(cells)
