"""The columns of the board: which there are, which fit, and what a cell of theirs says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ddpdoctor.core import units
from ddpdoctor.render.lines import columns, fit
from ddpdoctor.top.snapshot import PHASES, RankRow, Times
from ddpdoctor.top.view import number

LEAST_TREND, MORE_TREND, MOST_TREND = 6, 15, 60
"""Columns of own time over the last steps: the fewest worth drawing, how many more it gets before
rare columns do, and the most."""

_PHASES = (*PHASES, "own", "total")

TIMES = (*PHASES, "own", "total")


@dataclass(frozen=True)
class Column:
    """A column, and how soon it goes when there is no room: the least importance first."""

    name: str
    title: str
    width: int
    importance: int
    shown: Callable[[float | None], str] | None = None
    """How its numbers are shown, where it has numbers that are no times."""
    live: bool = True
    """Whether it says what the rank does, which words replace for one that does nothing."""
    left: bool = False
    of_gpu: bool = False


_COLUMNS = (
    Column("rank", "rank", 4, 100, live=False),
    Column("stage", "stage", 5, 96, live=False),
    Column("gpu", "gpu", 7, 40, live=False, left=True),
    Column("step", "step", 6, 80, live=False),
    Column("phase", "doing", 9, 15, left=True),
    Column("heartbeat", "beat", 4, 12, units.age),
    Column("own", "OWN", 5, 95),
    Column("data", "data", 4, 66),
    Column("forward", "fwd", 4, 62),
    Column("backward", "bwd", 5, 64),
    Column("optimizer", "opt", 4, 60),
    Column("wait", "wait", 5, 90),
    Column("memory", "mem", 4, 70, units.size),
    Column("memory_share", "mem%", 4, 14, units.percent, of_gpu=True),
    Column("utilization", "util", 4, 72, units.percent, of_gpu=True),
    Column("power", "watt", 4, 50, units.watts, of_gpu=True),
    Column("temperature", "temp", 4, 13, units.degrees, of_gpu=True),
    Column("total", "total", 5, 11),
)
SHORT = {"rank": "#", "gpu": ""}
"""Titles for columns that are narrower than their titles."""

QUANTILES = (*TIMES, "memory", "utilization", "power")
"""The columns that say something of many ranks."""


def phase_cell(times: Times | None, name: str, unit: units.TimeUnit) -> str:
    """A phase's time; ``~`` where the wait for others is in it, not measured separately."""
    if times is None:
        return units.MISSING
    value = float(getattr(times, name))
    if not times.split and name == "wait" and value <= 0:
        return units.MISSING
    mixed = "~" if not times.split and name in ("own", "backward", "wait") else ""
    return f"{mixed}{units.time_in(value, unit)}"


def fitting(ranks: Sequence[RankRow], room: int) -> tuple[tuple[Column, ...], int]:
    """The most important columns that fit, and the room for the trend (0: none)."""
    digits = max((len(str(row.rank)) for row in ranks), default=1)
    place_width = max((columns(place(row, 99)) for row in ranks), default=4)
    steps = [len(str(row.step)) for row in ranks if row.step is not None]
    widths = {
        "rank": max(4 if room >= 40 else 2, digits),
        "gpu": max(3, min(place_width, 8 if room < 100 else 12 if room < 140 else 20)),
        "step": max(4, max(steps, default=4)),
    }
    gpus = any(row.gpu is not None for row in ranks)
    staged = any(row.stage for row in ranks)
    possible = [
        replace(column, width=widths.get(column.name, column.width))
        for column in _COLUMNS
        if (gpus or not column.of_gpu) and (staged or column.name != "stage")
    ]
    wished = [(column.importance, column.name, column.width) for column in possible]
    # Beyond what eighty columns hold, the trend deserves room before the rarer columns do.
    wished += [(55, "trend", LEAST_TREND), (35, "more trend", MORE_TREND - 1)]
    left = room - 2
    taken: set[str] = set()
    for _, name, width in sorted(wished, reverse=True):
        if left <= width:
            # A column that is less important must not take the place of one that had none.
            break
        left -= width + 1
        taken.add(name)
    trend = 0
    if "trend" in taken:
        more = MORE_TREND if "more trend" in taken else 0
        trend = min(MOST_TREND, left + LEAST_TREND + more)
    return tuple(column for column in possible if column.name in taken), trend


def text_of(row: RankRow, column: Column, unit: units.TimeUnit) -> str:
    """What a cell says of a rank."""
    name = column.name
    if name in TIMES:
        return phase_cell(row.times, name, unit)
    if column.shown is not None:
        return column.shown(number(row, name))
    if name == "gpu":
        return place(row, column.width)
    value = getattr(row, name)
    return units.MISSING if value in (None, "") else str(value)


def cell(column: Column, text: str) -> str:
    """A text in the width of a column."""
    text = fit(text, column.width) if columns(text) > column.width else text
    gap = " " * (column.width - columns(text))
    return text + gap if column.left else gap + text


def place(row: RankRow, room: int) -> str:
    """``node:gpu``, the node's name cut where need be: its end tells nodes apart."""
    suffix = "" if row.gpu is None else f":{row.gpu.index}"
    node = row.node if row.node.replace(".", "").isdigit() else row.node.partition(".")[0]
    left = max(room - len(suffix), 0)
    if columns(node) > left:
        node = node[-left:] if left else ""
    return node + suffix
