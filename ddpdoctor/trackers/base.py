"""The common part of all trackers: their targets, and the numbers they get."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding
from ddpdoctor.core.formatting import shown, without_formatting
from ddpdoctor.top.snapshot import PHASES, Snapshot

MAX_RANKS = 32  # Maximum number of ranks with separate numbers: the first ones
MAX_TEXT = 8000  # Maximum characters of a finding
MAX_NAME = 100  # Maximum characters of a file name


class Tracker(Protocol):
    """A tracker's client. Any of its methods may block or raise."""

    place: str
    """Where to find the run there, in words."""

    has_past: bool
    """Whether past numbers can be sent."""

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Send the numbers of a step. ``time`` is in Unix seconds."""

    def finding(self, finding: Finding, step: int, time: float) -> None:
        """Send a finding."""

    def close(self, how: str, succeeded: bool) -> None:
        """Send buffered data, and how the run ended."""


def open_tracker(target: str, run: Snapshot) -> Tracker:
    """Connect to a tracker.

    Args:
        target: The tracker's name, optionally with a colon and a directory, project or URL.
        run: The run as it is now.

    Raises:
        DoctorError: Its package is not installed.
    """
    name, _, place = target.partition(":")
    try:
        module: Any = importlib.import_module(f"ddpdoctor.trackers.{name}")
    except ImportError as error:
        raise DoctorError(
            f"{name} needs a package that cannot be imported: {error}",
            f"pip install 'ddpdoctor[{name}]'",
        ) from None
    return cast(Tracker, module.Client(place, run))


def numbers_of(snapshot: Snapshot) -> dict[str, float]:
    """Return the numbers of a frame by name. Unknown ones are left out."""
    job, median = snapshot.job, snapshot.median
    found: dict[str, float | None] = {
        "steps_per_second": job.rate,
        "samples_per_second": job.samples_rate,
        "skew": snapshot.skew,
        "findings": len(snapshot.findings),
    }
    if median is not None:
        found["step_seconds"] = median.total
        found |= {f"{name}_seconds": getattr(median, name) for name in PHASES}
    for row in sorted(snapshot.ranks, key=lambda row: row.rank)[:MAX_RANKS]:
        rank = f"rank{row.rank}"
        if row.times is not None:
            found[f"{rank}/own_seconds"] = row.times.own
            found[f"{rank}/wait_seconds"] = row.times.wait
        found[f"{rank}/memory_bytes"] = row.memory
        found[f"{rank}/gpu_utilization"] = None if row.gpu is None else row.gpu.utilization
    found["memory_bytes"] = _largest(row.memory for row in snapshot.ranks)
    return {f"ddpdoctor/{name}": float(each) for name, each in found.items() if each is not None}


def _largest(values: Iterable[int | None]) -> int | None:
    return max((each for each in values if each is not None), default=None)


def file_name(text: str) -> str:
    """Return the name of a run or code without characters that lead to another directory."""
    return re.sub(r"[^\w.-]", "_", text, flags=re.ASCII)[:MAX_NAME]


def text_of(finding: Finding) -> str:
    """Return a finding as text: message, evidence, place and fix."""
    lines = [f"{finding.severity.label} {finding.code}: {finding.message}", *finding.evidence]
    lines += [f"at {finding.location}"] if finding.location else []
    lines += [f"fix: {finding.fix}"] if finding.fix else []
    return shown(without_formatting("\n".join(lines))[:MAX_TEXT], "\n")
