"""The newest steps of a rank, more of them than a snapshot keeps."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.records.decode import parse
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank

_LINE = 400
"""Bytes that a step takes at most, about."""


def newest_steps(directory: Path, rank: Rank, most: int) -> list[StepRecord]:
    """At most so many steps, the newest ones, oldest of them first.

    Args:
        directory: The run directory.
        rank: The rank.
        most: How many.
    """
    path = directory / f"{rank_stem(rank.rank, rank.restart)}.jsonl"
    newest = _steps(path, most)
    older = _steps(path.with_name(path.name + ".1"), most - len(newest))
    return [*older, *newest]


def _steps(path: Path, most: int) -> list[StepRecord]:
    if most <= 0:
        return []
    try:
        lines = opening.ending(path, most * _LINE).split(b"\n")
    except OSError:
        return []
    wanted = [each for each in lines if each.startswith(b'{"kind":"step"')][-most:]
    found = (parse(line) for line in wanted)
    return [each for each in found if isinstance(each, StepRecord) and each.step >= 0]
