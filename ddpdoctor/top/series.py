"""Time series for large screens: step time and memory of the rank that matters."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.top import bars, units
from ddpdoctor.top.line import Line, columns
from ddpdoctor.top.marks import Marks
from ddpdoctor.top.snapshot import RankRow


def chart(
    title: str, values: Sequence[float], tops: tuple[str, str], top: float, room: int, height: int,
    marks: Marks,
) -> list[Line]:  # fmt: skip
    """A titled chart of ``height`` lines: the axis on the left, the newest value on the right."""
    gutter = max(columns(tops[0]), columns(tops[1])) + 1
    drawn = bars.chart(values, top, max(room - gutter, 1), height - 1, marks)
    lines: list[Line] = [((title, "dim"),)]
    for number, row in enumerate(drawn):
        label = tops[0] if number == 0 else tops[1] if number == len(drawn) - 1 else ""
        lines.append(((f"{label:>{gutter - 1}} ", "dim"), (row, "bar")))
    return lines


def step_time(row: RankRow, room: int, height: int, marks: Marks) -> list[Line]:
    """The duration of the last steps of a rank."""
    if not row.totals:
        return []
    top = bars.axis(row.totals)
    return chart(
        f"step time of rank {row.rank}, the last {len(row.totals)} steps",
        row.totals, (units.duration(top), "0"), top, room, height, marks,
    )  # fmt: skip


def memory(row: RankRow, past: Sequence[int], room: int, height: int, marks: Marks) -> list[Line]:
    """The memory of a rank while the monitor looked on."""
    whole = row.gpu.memory_total if row.gpu is not None else None
    top = whole or max(past)
    return chart(
        f"memory of rank {row.rank}, since the monitor started",
        [float(value) for value in past], (units.size(top), "0"), float(top), room, height, marks,
    )  # fmt: skip
