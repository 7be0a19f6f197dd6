"""Draw the board of ranks: the columns that fit, and a line for each rank."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median

from ddpdoctor.core import formatting
from ddpdoctor.core.formatting import bracketed
from ddpdoctor.render.terminal import Line, Span, fit, labelled, text_width
from ddpdoctor.run.memory_growth import EARLY_SEGMENTS, steady_growth
from ddpdoctor.top.draw import drawing
from ddpdoctor.top.draw.drawing import Frame, Scene
from ddpdoctor.top.headline import slow_phase
from ddpdoctor.top.snapshot import PHASES, Gpu, RankRow, Times, memory_share
from ddpdoctor.top.view import by_node, rank_value, selected_rows

# -- the columns of the board: their definitions, those that fit, and the text of each cell


MIN_BAR, MAX_BAR = 20, 80  # Minimum and maximum width of a step's bar

TIME_COLUMNS = (*PHASES, "own", "total")


@dataclass(frozen=True)
class Column:
    """A column. If there is little room, the least important ones are dropped first."""

    name: str
    title: str
    width: int
    importance: int
    unit: str = ""  # Empty for times, which share their unit
    shown: Callable[[float | None], str] | None = None  # Formats its numbers, if they are not times
    live: bool = True  # Whether words may replace it for a rank that does not run
    left: bool = False
    of_gpu: bool = False


_COLUMNS = (
    Column("rank", "rank", 4, 100, live=False),
    Column("stage", "stage", 5, 96, live=False),
    Column("place", "gpu", 7, 52, live=False, left=True),
    Column("step", "step", 6, 30, live=False),
    Column("phase", "doing", 9, 15, left=True),
    Column("heartbeat", "beat", 4, 12, "ago", formatting.age),
    Column("own", "OWN", 5, 95),
    Column("data", "data", 4, 88),
    Column("forward", "fwd", 4, 84),
    Column("backward", "bwd", 5, 86),
    Column("optimizer", "opt", 4, 60),
    Column("wait", "wait", 5, 90),
    Column("memory", "mem", 5, 70, "bytes", formatting.size),
    Column("utilization", "util", 5, 72, "%", formatting.percent, of_gpu=True),
    Column("power", "watt", 4, 50, "W", formatting.watts, of_gpu=True),
    Column("temperature", "temp", 4, 13, "C", formatting.degrees, of_gpu=True),
    Column("total", "total", 5, 11),
)
_BAR_IMPORTANCE = 92

_OPTIONAL = ("stage", "phase", "heartbeat", "memory", "utilization", "power", "temperature")
"""Columns to omit if no rank has a value, as in a finished run or one without a pipeline."""

_METER_WIDTHS = {"memory": 12, "utilization": 10}
"""The columns that are bars, and their widths on a wide screen."""

QUANTILES = (*TIME_COLUMNS, "memory", "utilization", "power")
"""The columns whose quantiles over many ranks are meaningful."""

_MEMORY_STYLES = ((0.95, "error"), (0.80, "warning"), (0.0, "good"))
_UTILIZATION_STYLES = ((0.70, "good"), (0.30, "warning"), (0.0, "error"))
"""Colours by minimum share: an idle GPU is bad."""


def phase_cell(times: Times | None, name: str, unit: formatting.TimeUnit) -> str:
    """Format a phase's time, with ``~`` if an unknown part of it is the wait for others."""
    if times is None:
        return formatting.MISSING
    value = float(getattr(times, name))
    if not times.split and name == "wait" and value <= 0:
        return formatting.MISSING
    mixed = "~" if not times.split and name in ("own", "backward", "wait") else ""
    return f"{mixed}{formatting.time_in(value, unit)}"


def fitting_columns(
    ranks: Sequence[RankRow], room: int, min_bar: int = MIN_BAR
) -> tuple[tuple[Column, ...], int]:
    """Return the most important columns that fit, and the room for the bar (0: no bar)."""
    possible = _possible_columns(ranks, room)
    wished = [(column.importance, column.name, column.width) for column in possible]
    wished.append((_BAR_IMPORTANCE, "bar", min_bar))
    left = room - 2
    taken: set[str] = set()
    for _, name, width in sorted(wished, reverse=True):
        if left <= width:
            # A less important column must not replace one that did not fit.
            break
        left -= width + 1
        taken.add(name)
    bar = min(max(MAX_BAR, min_bar), left + min_bar) if "bar" in taken else 0
    return tuple(column for column in possible if column.name in taken), bar


def _possible_columns(ranks: Sequence[RankRow], room: int) -> list[Column]:
    """Return the columns in which these ranks have values, with their titles and widths."""
    gpus = any(row.gpu is not None for row in ranks)
    nodes = len({row.node for row in ranks}) > 1

    def has_value(row: RankRow, name: str) -> bool:
        words = name in ("stage", "phase")
        return bool(getattr(row, name)) if words else rank_value(row, name) is not None

    left_out = {
        *(column.name for column in _COLUMNS if column.of_gpu and not gpus),
        *(name for name in _OPTIONAL if not any(has_value(row, name) for row in ranks)),
        *(["place"] if not gpus and not nodes else []),
    }
    widths = _widths(ranks, room) | (_METER_WIDTHS if room >= 130 and gpus else {})
    titles = {"place": "gpu" if gpus else "node", "memory": "mem" if gpus else "rss"}
    return [
        replace(
            column,
            width=widths.get(column.name, column.width),
            title=titles.get(column.name, column.title),
        )
        for column in _COLUMNS
        if column.name not in left_out
    ]


def _widths(ranks: Sequence[RankRow], room: int) -> dict[str, int]:
    """Return the widths of columns that depend on the job's numbers and names."""
    rank = max((len(str(row.rank)) for row in ranks), default=1)
    step = max((len(str(row.step)) for row in ranks if row.step is not None), default=4)
    place = max((text_width(node_and_gpu(row, 99)) for row in ranks), default=4)
    return {
        "rank": max(4 if room >= 40 else 2, rank),
        "place": max(3, min(place, 8 if room < 100 else 12 if room < 140 else 20)),
        "step": max(4, step),
    }


def rank_cell(row: RankRow, column: Column, unit: formatting.TimeUnit, style: str) -> Line:
    """Draw a cell of a rank's line."""
    name = column.name
    if name in TIME_COLUMNS:
        text = phase_cell(row.times, name, unit)
    elif name == "memory" and row.gpu is not None and column.width > 9:
        text = f"{formatting.size(row.memory)}/{formatting.size(row.gpu.memory_total)}"
    elif column.shown is not None:
        text = column.shown(rank_value(row, name))
    elif name == "place":
        text = node_and_gpu(row, column.width)
    else:
        value = getattr(row, name)
        text = formatting.MISSING if value in (None, "") else str(value)
    if row.gpu is None or name not in _METER_WIDTHS:
        return ((fitted_cell(column, text), style),)
    share, scale = row.gpu.utilization, _UTILIZATION_STYLES
    if name == "memory":
        share, scale = memory_share(row.gpu), _MEMORY_STYLES
    colour = next((colour for least, colour in scale if (share or 0.0) >= least), "good")
    return drawing.meter(text, share, column.width, colour)


def fitted_cell(column: Column, text: str) -> str:
    """Fit a text into the width of a column."""
    text = fit(text, column.width) if text_width(text) > column.width else text
    gap = " " * (column.width - text_width(text))
    return text + gap if column.left else gap + text


def node_and_gpu(row: RankRow, room: int) -> str:
    """Return ``node:gpu``. Cut the start of a long name, because the end distinguishes nodes."""
    suffix = "" if row.gpu is None else f":{row.gpu.index}"
    node = row.node if row.node.replace(".", "").isdigit() else row.node.partition(".")[0]
    left = max(room - len(suffix), 0)
    if text_width(node) > left:
        node = node[-left:] if left else ""
    return node + suffix


# -- draw groups of ranks with the same activity


_LABEL_WIDTH = 9
_OVER = ("dead", "ended")


@dataclass(frozen=True)
class RankGroup:
    """Ranks with the same activity."""

    ranks: tuple[int, ...]
    doing: str  # Phase or collective, or the state if the rank does nothing
    site: str
    since: float | None  # Seconds since the first of them began the activity


def rank_groups(rows: Sequence[RankRow]) -> list[RankGroup]:
    """Group ranks by activity. Small groups come first, because they are the unusual ones."""
    found: dict[tuple[str, str], list[RankRow]] = {}
    for row in rows:
        found.setdefault((activity_text(row), short_site(row.site)), []).append(row)
    groups = []
    for (what, site), members in found.items():
        ages = [row.since for row in members if row.since is not None and row.state not in _OVER]
        ranks = tuple(sorted(row.rank for row in members))
        groups.append(RankGroup(ranks, what, site, max(ages, default=None)))
    return sorted(groups, key=lambda group: (len(group.ranks), group.ranks))


def activity_text(row: RankRow) -> str:
    """Describe a rank's activity in a few words."""
    if row.state in _OVER:
        return row.said or row.state
    what = f"{row.phase or 'unknown'} ({row.collective})" if row.collective else row.phase
    if row.state == "debugger":
        return f"in the debugger, {what}" if what else "in the debugger"
    return what or row.state


@lru_cache(maxsize=1024)
def short_site(site: str) -> str:
    """Return a place in the code, relative to the working directory if below it."""
    path, colon, line = site.rpartition(":")
    if not path:
        return site
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return site
    return f"{path if relative.startswith('..') else relative}{colon}{line}"


def group_line(group: RankGroup, scene: Scene) -> Line:
    """Draw a group: ranks, activity, place, duration. Use fewer words if there is little room."""
    ranks = scene.cut(bracketed(group.ranks), max(scene.room // 3, 8))
    since = "" if group.since is None else f" for {formatting.duration(group.since)}"
    site = f" {group.site}" if group.site else ""
    name = f" {site.rpartition('/')[2].strip()}" if site else ""
    left = scene.room - text_width(ranks) - 1
    text = f"{group.doing}{site}{since}"
    for shorter in (f"{group.doing}{name}{since}", f"{group.doing}{name}"):
        if text_width(text) <= left:
            break
        text = shorter
    return ((f"{ranks} ", "bold"), (scene.cut(text, left), ""))


def activity_lines(row: RankRow, processes: Sequence[str], room: int) -> list[Line]:
    """Draw the activity of one rank, and the processes below it."""
    facts = [
        ("doing", activity_text(row)),
        ("at", short_site(row.site)),
        ("for", "" if row.since is None else formatting.duration(row.since)),
        ("collective", row.collective),
        ("process", "" if row.pid is None else str(row.pid)),
        *(("below it", each) for each in processes),
    ]
    return [line for label, text in facts if text for line in labelled(label, text, room, 12)]


# -- one rank in full


def full_rank(row: RankRow, scene: Scene) -> list[Line]:
    """Draw everything known about a rank, the most important first."""
    facts = [f"rank {row.rank} on {row.node or 'this node'}"]
    facts += [f"stage {row.stage}"] if row.stage else []
    facts += [f"pid {row.pid}"] if row.pid is not None else []
    facts += [f"local rank {row.local_rank}"] if row.local_rank is not None else []
    facts += [f"restart {row.restart}"] if row.restart else []
    facts += [f"epoch {row.epoch}"] if row.epoch is not None else []
    lines = [scene.rule(", ".join(facts)), *_step_lines(row, scene)]
    port = row.debug_port
    for label, text in (
        ("now", _now_text(row)),
        ("memory", _memory_text(row) + _slope_text(row, scene)),
        ("gpu", "" if row.gpu is None else _gpu_text(row.gpu)),
        ("cost", "" if row.cost is None else f"ddpdoctor takes {row.cost:.2%} of its time"),
        ("debugger", "" if port is None else f"attach to port {port} (a: how)"),
        ("records", f"{row.dropped} dropped: its journal has gaps" if row.dropped else ""),
    ):
        if text:
            lines += labelled(label, text, scene.room, _LABEL_WIDTH)
    if row.output:
        lines += [(("last output", "dim"),), *(((f" {text}", ""),) for text in row.output)]
    return lines


def _step_lines(row: RankRow, scene: Scene) -> list[Line]:
    """Draw the steps of a rank and of the median rank as bars, with a legend."""
    room = scene.room
    if row.times is None:
        return labelled("step", "no step has ended yet", room, _LABEL_WIDTH)
    shown = [("step", row.times)]
    if scene.snapshot.median is not None and len(scene.snapshot.ranks) > 1:
        shown.append(("median", scene.snapshot.median))
    typical = scene.snapshot.median or row.times
    longest = drawing.axis_end(max(row.times.total, typical.total))
    width = max(room - _LABEL_WIDTH, 4)
    lines: list[list[Span]] = [
        [(f"{label:<{_LABEL_WIDTH}}", "dim"), *drawing.step_bar(times, width, longest, scene.marks)]
        for label, times in shown
    ]
    unit = formatting.unit_for(longest)
    legend = [
        (f"{drawing.glyph(phase, scene.marks)} {phase} {phase_cell(row.times, phase, unit)}", phase)
        for phase in PHASES
    ]
    legend.append((f"= {formatting.time_in(row.times.total, unit)} {unit.name}", "bold"))
    used = max(room, _LABEL_WIDTH) + 1
    for text, style in legend:
        # The last entry needs no gap after it.
        if used + text_width(text) + 2 * (style != "bold") > room and used > _LABEL_WIDTH:
            lines.append([(" " * _LABEL_WIDTH, "")])
            used = _LABEL_WIDTH
        lines[-1] += [(text, style), ("  ", "")]
        used += text_width(text) + 2
    drawn = [tuple(line) for line in lines]
    if not row.times.split:
        text = "~ backward includes the wait for others: it is not measured separately"
        drawn += labelled("", text, room, _LABEL_WIDTH, "dim")
    return drawn


def _now_text(row: RankRow) -> str:
    text = activity_text(row)
    if row.since is not None and row.state not in _OVER:
        text += f" for {formatting.duration(row.since)}"
    if row.site:
        text += f", at {short_site(row.site)}"
    if row.state in ("running", *_OVER):
        return text
    return ", ".join(part for part in (row.state, row.said, text) if part)


def _memory_text(row: RankRow) -> str:
    sizes: list[tuple[str, int | None]] = [
        ("allocated", row.allocated),
        ("reserved", row.reserved),
        ("peak", row.peak),
        ("device", None if row.gpu is None else row.gpu.memory_used),
        ("host", row.rss),
    ]
    facts = {name: f"{name} {formatting.size(value)}" for name, value in sizes if value is not None}
    if "device" in facts and row.gpu is not None and row.gpu.memory_total:
        facts["device"] += f" of {formatting.size(row.gpu.memory_total)}"
    return ", ".join(facts.values())


_MIN_GROWTH = 16 << 20  # Minimum growth of a rank in bytes to show its slope


def _slope_text(row: RankRow, scene: Scene) -> str:
    """Return the growth of a rank's memory per minute, if it is steady."""
    known = [(each.time, each.memory.get(row.rank)) for each in scene.material.points]
    readings = [(int(at * 1000), size) for at, size in known if size is not None]
    found = steady_growth(readings, _MIN_GROWTH, EARLY_SEGMENTS)
    return "" if found is None else f", grows {formatting.size(60_000 * found.per_step)} a minute"


def _gpu_text(gpu: Gpu) -> str:
    facts = [f"{gpu.index} {gpu.name}".strip() + (" (MIG)" if gpu.mig else "")]
    if gpu.utilization is not None:
        facts.append(f"util {formatting.percent(gpu.utilization)}")
    if gpu.power is not None:
        limit = f" of {formatting.watts(gpu.power_limit)}" if gpu.power_limit else ""
        facts.append(f"{formatting.watts(gpu.power)}{limit}")
    if gpu.temperature is not None:
        facts.append(formatting.degrees(gpu.temperature))
    if gpu.clock is not None:
        most = f" of {gpu.clock_max / 1e6:.0f}" if gpu.clock_max else ""
        facts.append(f"{gpu.clock / 1e6:.0f}{most} MHz")
    facts += link_facts(gpu)
    facts += [f"throttled: {reason}" for reason in gpu.throttle]
    facts += [f"{gpu.ecc_errors} ECC errors"] if gpu.ecc_errors else []
    return ", ".join([*facts, gpu.problem] if gpu.problem else facts)


def link_facts(gpu: Gpu) -> list[str]:
    """Describe the traffic on a GPU's links."""
    links = (("PCIe", gpu.pcie), ("NVLink", gpu.nvlink))
    return [f"{name} {formatting.size(rate)}/s" for name, rate in links if rate is not None]


# -- the board

WORDS_INSTEAD = ("dead", "starting", "debugger")
"""States in which words replace a rank's numbers, if there is no room for both."""

_NOT_TRAINING = ("hung", "failing", "restarting")
"""States of a run in which the ranks' activities matter, not the duration of their steps."""

_STYLES = {"dead": "error", "stale": "dim", "ended": "dim", "starting": "dim"}
"""Styles of ranks' lines by state."""

_Node = tuple[str, Sequence[RankRow]]  # A node and its ranks, for the line above them


def draw_board(scene: Scene, height: int) -> Frame:
    """Draw the board in at most ``height`` lines: header, ranks, median, legend."""
    return _Board(scene).draw(height) if height > 0 else Frame(())


def board_lines(scene: Scene) -> int:
    """Return the number of lines of a whole board."""
    ranks = selected_rows(scene.snapshot, scene.view)
    nodes = len({row.node for row in scene.snapshot.ranks}) if scene.view.grouped else 0
    return max(len(ranks), 1) + nodes + 4


class _Board:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._snapshot = snapshot = scene.snapshot
        self._view = scene.view
        self._room = scene.room
        self._marks = scene.marks
        self._ranks = selected_rows(snapshot, scene.view)
        totals = [row.times.total for row in snapshot.ranks if row.times is not None]
        self._unit = formatting.unit_for(max(totals, default=1.0))
        self._training = snapshot.state not in _NOT_TRAINING
        self._bar = scene.room
        min_bar = MIN_BAR
        if not self._training:
            words = max((text_width(self._words(row)) for row in self._ranks), default=0)
            min_bar = max(MIN_BAR, min(words + 1, scene.room // 2))
        self._columns, self._bar = fitting_columns(snapshot.ranks, scene.room, min_bar)
        self._axis = drawing.axis_end(max(totals, default=0.0))

    def draw(self, height: int) -> Frame:
        """Draw at most ``height`` lines."""
        header, last, legend = self._around(height)
        body = height - header - last - legend
        entries = self._entries(body)
        first, count, tail = self._window(entries, body)
        lines: list[Line] = self._header(header)
        about: dict[int, int] = {}
        for entry in entries[first : first + count]:
            if isinstance(entry, RankRow):
                about[len(lines)] = entry.rank
                lines.append(self._rank_line(entry))
            else:
                about[len(lines)] = entry[1][0].rank
                lines.append(self._node_line(*entry))
        if tail:
            rest = [each for each in entries[first + count :] if isinstance(each, RankRow)]
            lines += self._tail(rest, first, len(entries) - first - count, tail)
        if not entries:
            empty = "no rank passes the filter" if self._view.filter else "no rank has started yet"
            lines.append(((f"  {empty}", "dim"),))
        if last:
            lines.append(self._median_line())
        if legend:
            lines.append(self._legend())
        return Frame(tuple(lines[:height]), about, top=first)

    def _around(self, height: int) -> tuple[int, int, int]:
        """Return the lines of header, median and legend."""
        ranks = len(self._ranks)
        spare = height - ranks
        header = 0 if height < 3 else 2 if spare >= 4 or height >= 12 else 1
        fits = height >= 5 or height - header > ranks
        last = 1 if fits and self._snapshot.median is not None and ranks > 1 else 0
        timed = self._bar and self._axis and self._training
        legend = 1 if timed and (spare >= header + last + 1 or height >= 14) else 0
        return header, last, legend

    def _legend(self) -> Line:
        short = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}
        spans: list[Span] = [("   ", "")]
        for phase in PHASES:
            name = phase if self._room >= 66 else short.get(phase, phase)
            spans += [(drawing.glyph(phase, self._marks) * 2, phase), (f" {name}  ", "dim")]
        return tuple(spans)

    def _entries(self, body: int) -> list[RankRow | _Node]:
        """Return the lines of the board: ranks, below their nodes if they are grouped."""
        if not self._view.grouped:
            return list(self._ranks)
        nodes = by_node(self._ranks)
        share = len(self._ranks)
        if len(nodes) + share > body:
            # Not all of them fit: show the worst ranks of each node, as many as there is room for.
            share = max(0, (body - 1) // max(len(nodes), 1) - 1)
        entries: list[RankRow | _Node] = []
        for node in nodes.items():
            entries.append(node)
            entries += [
                row
                for number, row in enumerate(node[1])
                if number < share or row.rank == self._view.cursor
            ]
        return entries

    def _window(self, entries: Sequence[RankRow | _Node], body: int) -> tuple[int, int, int]:
        """Return the first entry, the number shown, and the lines left for the others."""
        if len(entries) <= body:
            return 0, len(entries), 0
        tail = 4 if body >= 12 else 1 if body >= 3 else 0
        count = max(body - tail, 1)
        first = min(self._view.top, len(entries) - count)
        for at, entry in enumerate(entries):
            if isinstance(entry, RankRow) and entry.rank == self._view.cursor:
                first = min(max(first, at - count + 1), at)
                break
        return max(first, 0), count, tail

    def _cells(self, text: Callable[[Column], str]) -> str:
        return "  " + "".join(f" {fitted_cell(column, text(column))}" for column in self._columns)

    def _header(self, lines: int) -> list[Line]:
        """Draw the titles, and in a second line their units."""
        titles: list[Span] = [("  ", "head")]
        units: list[Span] = [("  ", "head")]
        for column in self._columns:
            title = column.title if len(column.title) <= column.width else "#"
            phase = column.name if column.name in PHASES else "head"
            style = "bold" if column.name == self._view.sort else phase
            titles += [(" ", "head"), (fitted_cell(column, title), style)]
            unit = self._unit.name if column.name in TIME_COLUMNS else column.unit
            units += [(" ", "head"), (fitted_cell(column, unit), "head")]
        if self._bar and self._training and self._axis:
            end = f"{formatting.time_in(self._axis, self._unit)} {self._unit.name}"
            title = "step" if lines > 1 else f"step, 0 to {end}"
            titles.append((f" {fit(title, self._bar)}", "head"))
            units.append((f" 0{end:>{self._bar - 1}}", "head"))
        return [tuple(titles), tuple(units)][:lines]

    def _rank_line(self, row: RankRow) -> Line:
        words = self._words(row)
        head = self._rank_cells(row, words)
        bar: Line = ()
        if words:
            used = sum(text_width(text) for text, _ in head)
            words = self._scene.cut(words, self._room - used - 1)
            head.append((f" {words}", _STYLES.get(row.state, "")))
        elif self._bar and row.times is not None:
            stacked = drawing.step_bar(row.times, self._bar, self._axis, self._marks)
            bar = ((" ", ""), *stacked)
        if row.rank != self._view.cursor:
            return (*head, *bar)
        text = "".join(text for text, _ in head)
        return ((text if bar else fit(text, self._room), "cursor"), *bar)

    def _rank_cells(self, row: RankRow, words: str) -> list[Span]:
        """Draw cursor, sign and numbers. Omit numbers that do not fit next to the ``words``."""
        verdict, style = self._snapshot.verdict, _STYLES.get(row.state, "")
        blamed = row.rank == verdict.rank
        guilty, usual = "", self._snapshot.median
        if blamed:
            guilty = verdict.phase
            if not guilty and verdict.level != "ok" and usual is not None:
                guilty = slow_phase(row.times, usual, 0.05 * usual.total)
        cells: list[Span] = [
            (self._marks.cursor if row.rank == self._view.cursor else " ", ""),
            (
                self._marks.state(row.state, blamed),
                verdict.level if blamed and row.state != "dead" else style or "info",
            ),
        ]
        fits = row.times is not None and text_width(words) <= self._bar
        numbers = fits or not words or row.state not in WORDS_INSTEAD
        for column in self._columns:
            if column.live and not numbers:
                break
            marked = "guilty" if column.name == guilty else style or ("bold" if blamed else "")
            cells += [(" ", ""), *rank_cell(row, column, self._unit, marked)]
        return cells

    def _words(self, row: RankRow) -> str:
        """Describe a rank that is not simply running. Empty for a running rank."""
        room = self._bar or self._room // 2
        if row.state == "stale":
            text = row.said or f"no heartbeat for {formatting.duration(row.heartbeat)}"
            return text if text_width(text) <= room else f"stale {formatting.age(row.heartbeat)}"
        if row.state == "running" and not self._training:
            since = "" if row.since is None else f" for {formatting.duration(row.since)}"
            site = f", {short_site(row.site).rpartition('/')[2]}" if row.site else ""
            return f"{activity_text(row)}{since}{site}"
        if row.state == "running" or (row.state == "ended" and row.times is not None):
            return ""
        if row.said and row.state == "dead" and not row.said.startswith("dead"):
            return f"dead: {row.said}"
        return row.said or ("in the debugger" if row.state == "debugger" else row.state)

    def _node_line(self, node: str, ranks: Sequence[RankRow]) -> Line:
        """Draw a node in one line: its number of ranks, the slowest one, its GPUs, states."""
        parts = [formatting.count(len(ranks), "rank")]
        owns = {row.rank: row.times.own for row in ranks if row.times is not None}
        if owns:
            worst, unit = max(owns, key=owns.__getitem__), self._unit
            parts += [
                f"OWN {formatting.time_in(median(owns.values()), unit)} {unit.name}",
                f"most {formatting.time_in(owns[worst], unit)} on rank {worst}",
            ]
        gpus = [row.gpu for row in ranks if row.gpu is not None]
        used = [gpu.utilization for gpu in gpus if gpu.utilization]
        watts = [gpu.power for gpu in gpus if gpu.power is not None]
        parts += [f"util {formatting.percent(median(used))}"] if used else []
        parts += [f"{formatting.figures(sum(watts))} W"] if watts else []
        states = Counter(row.state for row in ranks if row.state != "running")
        parts += [f"{count} {state}" for state, count in sorted(states.items())]
        name = node or "node"
        text = f" {name if self._room >= 40 else name[-12:]}:"
        for part in parts:
            more = f", {part}" if part is not parts[0] else f" {part}"
            if text_width(text) + text_width(more) > self._room:
                break
            text += more
        return ((self._scene.cut(text), "bold"),)

    def _tail(self, rest: Sequence[RankRow], before: int, after: int, lines: int) -> list[Line]:
        """Summarize the ranks below the board in a few lines, with quantiles if they fit."""
        nodes = " nodes" if after and not rest else ""
        text = f"{self._marks.ellipsis} {after} more{nodes}" if after else "the last ones"
        above = f", {before} above" if before else ""
        result: list[Line] = [((f"  {text}{above}", "dim"),)]
        if lines < 4 or not rest:
            return result
        ordered = {
            column.name: sorted(
                value
                for row in rest
                if (value := rank_value(row, column.name)) is not None and math.isfinite(value)
            )
            for column in self._columns
            if column.name in QUANTILES
        }
        split = all(row.times.split for row in rest if row.times is not None)
        for share in (0.9, 0.5, 0.1):

            def quantile(column: Column, share: float = share) -> str:
                found = ordered.get(column.name)
                if found is None:
                    return f"{share:.0%}" if column.name == "rank" else ""
                value = found[min(len(found) - 1, int(share * len(found)))] if found else None
                if column.shown is not None:
                    return column.shown(value)
                if value is None or (column.name == "wait" and not split):
                    return formatting.MISSING
                mixed = "" if split or column.name not in ("own", "backward") else "~"
                return mixed + formatting.time_in(value, self._unit)

            result.append(((self._cells(quantile), "dim"),))
        return result

    def _median_line(self) -> Line:
        """Draw the median of all ranks, and the slowest rank's distance from it."""

        def typical(column: Column) -> str:
            if column.name in TIME_COLUMNS:
                return phase_cell(self._snapshot.median, column.name, self._unit)
            return "" if column.name != "rank" else "med" if column.width >= 3 else "m"

        text = self._cells(typical)
        skew = self._snapshot.skew
        if skew is not None:
            long, short = f"skew {skew:.2f}x", f"{skew:.1f}x"
            for words in (f"{long}: the slowest rank to the median", long, short):
                if len(words) + text_width(text) + 1 <= self._room:
                    text += f" {words}"
                    break
        return ((text, "info"),)
