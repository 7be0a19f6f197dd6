"""The whole text of a finding's traceback, kept in the run directory for who wants all of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.core import opening
from ddpdoctor.core.finding import Finding
from ddpdoctor.run import rundir

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run


def keep(run: Run, finding: Finding) -> Path | None:
    """Write it down; where it is now, or None if there is none, or the disk says no."""
    path = place(run, finding)
    if path is None:
        return None
    try:
        rundir.put(path, _text(finding))
    except OSError:
        return None
    return path


def kept(run: Run, finding: Finding) -> Path | None:
    """Where it was written during the run; None if it was not, or another one took its place."""
    path = place(run, finding)
    try:
        text = _text(finding)
        same = path is not None and opening.contents(path, len(text)) == text
    except OSError:
        return None
    return path if same else None


def place(run: Run, finding: Finding) -> Path | None:
    """The file of a finding, if it has a traceback."""
    if not finding.traceback.strip():
        return None
    rank = f"-rank-{finding.ranks[0]:04d}" if finding.ranks else ""
    return run.path / f"traceback-{finding.code}{rank}.txt"


def _text(finding: Finding) -> bytes:
    return f"{finding.traceback.rstrip()}\n".encode("utf-8", "replace")
