"""Define the columns of the board: which there are, which fit, and the text of each cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ddpdoctor.core import formatting
from ddpdoctor.render.terminal import Line, fit, text_width
from ddpdoctor.top.draw import drawing
from ddpdoctor.top.snapshot import PHASES, RankRow, Times, memory_share
from ddpdoctor.top.view import rank_value

MIN_BAR, MAX_BAR = 20, 80
"""Columns of a step's bar."""

TIME_COLUMNS = (*PHASES, "own", "total")


@dataclass(frozen=True)
class Column:
    """A column. Where room is short, the least important ones go first."""

    name: str
    title: str
    width: int
    importance: int
    unit: str = ""
    """Empty for times, which share their unit."""
    shown: Callable[[float | None], str] | None = None
    """Formats its numbers, if they are no times."""
    live: bool = True
    """Whether words may take its place for a rank that does not run."""
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
"""Columns left out if no rank has a value, as in a run that is over or without a pipeline."""

_METER_WIDTHS = {"memory": 12, "utilization": 10}
"""The columns that are bars, and how wide they are on a wide screen."""

QUANTILES = (*TIME_COLUMNS, "memory", "utilization", "power")
"""The columns whose quantiles over many ranks mean something."""

_MEMORY_STYLES = ((0.95, "error"), (0.80, "warning"), (0.0, "good"))
_UTILIZATION_STYLES = ((0.70, "good"), (0.30, "warning"), (0.0, "error"))
"""Colours from a share on: full memory is bad, and so is an idle GPU."""


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
    """Return the most important columns that fit, and the room for the bar (0: none).

    Args:
        ranks: The rows.
        room: Columns of the screen.
        min_bar: Columns that the bar needs.
    """
    possible = _possible_columns(ranks, room)
    wished = [(column.importance, column.name, column.width) for column in possible]
    wished.append((_BAR_IMPORTANCE, "bar", min_bar))
    left = room - 2
    taken: set[str] = set()
    for _, name, width in sorted(wished, reverse=True):
        if left <= width:
            # A less important column must not take the place of one that had no room.
            break
        left -= width + 1
        taken.add(name)
    bar = min(max(MAX_BAR, min_bar), left + min_bar) if "bar" in taken else 0
    return tuple(column for column in possible if column.name in taken), bar


def _possible_columns(ranks: Sequence[RankRow], room: int) -> list[Column]:
    """Return the columns that these ranks have something for, with their titles and widths."""
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
    """Return ``node:gpu``. A long name loses its beginning, since the end tells nodes apart."""
    suffix = "" if row.gpu is None else f":{row.gpu.index}"
    node = row.node if row.node.replace(".", "").isdigit() else row.node.partition(".")[0]
    left = max(room - len(suffix), 0)
    if text_width(node) > left:
        node = node[-left:] if left else ""
    return node + suffix
