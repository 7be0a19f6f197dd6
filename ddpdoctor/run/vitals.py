"""Reads memory of ranks and load of GPUs over a run (`ddpdoctor.supervise.vitals` writes it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.run.names import VITALS
from ddpdoctor.run.reader import MOST_RANKS
from ddpdoctor.run.records.decode import SUPERVISOR_RECORDS, parse
from ddpdoctor.run.records.supervisor import GpuVitals, RankMemory, VitalsRecord

MOST_BYTES = 4 << 20
MOST_LINE = 1 << 18
MOST_SAMPLES = 1200
MOST_CURVES = 64
"""Ranks, or GPUs, with a curve each; of more there are the least, the median and the most."""


def read(directory: Path) -> list[VitalsRecord]:
    """The samples, oldest first; none where nothing can be read."""
    try:
        lines = opening.ending(directory / VITALS, MOST_BYTES).split(b"\n")[-MOST_SAMPLES:]
    except OSError:
        return []
    found = (parse(line, SUPERVISOR_RECORDS) for line in lines if len(line) <= MOST_LINE)
    return [each for each in found if isinstance(each, VitalsRecord)]


def content(directory: Path, restart: int, started: float) -> dict[str, Any]:
    """Curves of one attempt: seconds, and by name a value for each of them, or null.

    Args:
        directory: The run directory.
        restart: The attempt.
        started: Unix seconds from which on time is counted.
    """
    samples = [each for each in read(directory) if each.restart == restart]
    ranks = sorted({memory.rank for each in samples for memory in each.ranks})[:MOST_RANKS]
    gpus = sorted({(gpu.host, gpu.gpu) for each in samples for gpu in each.gpus})[:MOST_RANKS]
    memory = [{each.rank: each for each in sample.ranks} for sample in samples]
    load = [{(each.host, each.gpu): each for each in sample.gpus} for sample in samples]

    def of_ranks(value: Callable[[RankMemory], int | None]) -> list[list[float | None]]:
        return _curves([[value(at[key]) if key in at else None for key in ranks] for at in memory])

    def of_gpus(value: Callable[[GpuVitals], float | None]) -> list[list[float | None]]:
        return _curves([[value(at[key]) if key in at else None for key in gpus] for at in load])

    return {
        "times": [round(each.time / 1e9 - started, 2) for each in samples],
        "ranks": _names([f"rank {rank}" for rank in ranks]),
        "gpus": _names([f"{host} GPU {number}" for host, number in gpus]),
        "curves": {
            "rss": of_ranks(lambda each: each.rss),
            "allocated": of_ranks(lambda each: each.allocated),
            "reserved": of_ranks(lambda each: each.reserved),
            "memory": of_gpus(lambda each: each.memory_used),
            "utilization": of_gpus(lambda each: each.utilization),
            "power": of_gpus(lambda each: each.power),
            "temperature": of_gpus(lambda each: each.temperature),
        },
    }


def _names(names: list[str]) -> list[str]:
    return names if len(names) <= MOST_CURVES else ["least", "median", "most"]


def _curves(rows: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """A curve for each place of the rows, which are moments; none if no value is known."""
    if not any(value is not None for row in rows for value in row):
        return []
    if len(rows[0]) > MOST_CURVES:
        rows = [_spread([value for value in row if value is not None]) for row in rows]
    return [list(curve) for curve in zip(*rows, strict=True)]


def _spread(values: Sequence[float]) -> list[float | None]:
    return [min(values), median(values), max(values)] if values else [None] * 3
