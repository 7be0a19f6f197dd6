"""Whether the folder for temporary files has room: torch, compilers and loaders put files there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, check, failure, judged, typed, warning
from ddpdoctor.preflight.deadline import bounded
from ddpdoctor.preflight.machine.checkpoints import PATIENCE, written_to
from ddpdoctor.preflight.situation import Situation
from ddpdoctor.preflight.words import MIB, shown

LEAST = 256 * MIB
"""What torch.compile, Triton and DataLoader workers put there before anything is wrong."""


@check("temporary-dir", "DDP017")
def temporary_dir(situation: Situation) -> Outcome:
    """The directory for temporary files cannot be written, is full, or has no inodes left.

    What it finds
        A TMPDIR (or /tmp) in which no file can be made, or with less than 256 MiB or no inodes
        (`df -i`) free.

    Why it is bad
        torchrun, torch.compile, Triton and DataLoader workers write there. They fail with "No
        usable temporary directory found" or "No space left on device", on one node, when the job
        has already started.

    How to fix it
        Free some space, or set TMPDIR to another directory.

    Example
        Wrong: a /tmp of 1 GiB, filled by core dumps.
        Right: `export TMPDIR=/scratch/$USER`

    When it stays silent
        If a file could be written there and there is room.
    """
    named = situation.environ.get("TMPDIR", "")
    folder = Path(named) if named and Path(named).is_dir() else Path(_default())
    try:
        problem, free, inodes = bounded(lambda: written_to(folder), PATIENCE)
    except TimeoutError:
        problem, free, inodes = f"nothing came back within {PATIENCE:.0f} s", 0, -1
    lost = f"; TMPDIR={named} is no folder" if named and not Path(named).is_dir() else ""
    detail = f"{problem or shown(free) + ' free'} in {folder}{lost}"
    return judged(detail, _findings(folder, problem, free, inodes))


def _default() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return next((each for each in ("/tmp", "/var/tmp") if os.path.isdir(each)), "/tmp")


def _findings(folder: Path, problem: str, free: int, inodes: int) -> Iterator[Finding]:
    paste = typed("df -h {0}; df -i {0}", folder)
    if problem:
        yield failure(
            f"temporary files cannot be written to {folder}: {problem}",
            fix="Free some space there, or set TMPDIR to another folder, on every node.",
            paste=paste,
        )
    elif free < LEAST or inodes == 0:
        without = "" if inodes else ", and no inodes for another file"
        yield warning(
            f"{folder}, where temporary files go, has {shown(free)} free{without}",
            fix="Free some space there, or set TMPDIR to another folder, on every node.",
            paste=paste,
        )
