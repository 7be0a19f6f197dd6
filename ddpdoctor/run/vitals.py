"""Reads memory of ranks and load of GPUs over a run (`ddpdoctor.supervise.vitals` writes it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.run.names import VITALS
from ddpdoctor.run.records.decode import SUPERVISOR_RECORDS, parse
from ddpdoctor.run.records.supervisor import GpuVitals, RankMemory, VitalsRecord

MOST_BYTES = 4 << 20


def read(directory: Path) -> list[VitalsRecord]:
    """The samples, oldest first; none where nothing can be read."""
    try:
        lines = opening.ending(directory / VITALS, MOST_BYTES).split(b"\n")
    except OSError:
        return []
    found = (parse(line, SUPERVISOR_RECORDS) for line in lines)
    return [each for each in found if isinstance(each, VitalsRecord)]


def content(directory: Path, restart: int, started: float) -> dict[str, Any]:
    """Curves of one attempt: seconds, and by name a value for each of them, or null.

    Args:
        directory: The run directory.
        restart: The attempt.
        started: Unix seconds from which on time is counted.
    """
    samples = [each for each in read(directory) if each.restart == restart]
    ranks = sorted({memory.rank for each in samples for memory in each.ranks})
    gpus = sorted({(gpu.host, gpu.gpu) for each in samples for gpu in each.gpus})
    memory = [{each.rank: each for each in sample.ranks} for sample in samples]
    load = [{(each.host, each.gpu): each for each in sample.gpus} for sample in samples]

    def of_ranks(value: Callable[[RankMemory], int | None]) -> list[list[int | None]]:
        return [[value(at[rank]) if rank in at else None for at in memory] for rank in ranks]

    def of_gpus(value: Callable[[GpuVitals], float | None]) -> list[list[float | None]]:
        return [[value(at[gpu]) if gpu in at else None for at in load] for gpu in gpus]

    return {
        "times": [round(each.time / 1e9 - started, 2) for each in samples],
        "ranks": ranks,
        "gpus": [f"{host} GPU {number}" for host, number in gpus],
        "curves": {
            "rss": _known(of_ranks(lambda each: each.rss)),
            "allocated": _known(of_ranks(lambda each: each.allocated)),
            "reserved": _known(of_ranks(lambda each: each.reserved)),
            "memory": _known(of_gpus(lambda each: each.memory_used)),
            "utilization": _known(of_gpus(lambda each: each.utilization)),
            "power": _known(of_gpus(lambda each: each.power)),
            "temperature": _known(of_gpus(lambda each: each.temperature)),
        },
    }


def _known(curves: Sequence[Sequence[float | None]]) -> Sequence[Sequence[float | None]]:
    """The curves, none if they hold no value at all."""
    return curves if any(value is not None for curve in curves for value in curve) else []
