"""What a sick job says about itself: the findings to expect, and how to start it.

A mark stands on the guilty line: ``# expect: DDP305`` for a finding of the job as a whole or on any
rank, ``# expect: DDP305 rank 1`` or ``ranks 0,2`` for exactly these. ``# or: DDP805 rank 1`` is a
line at which the same finding may stand instead: it takes py-spy to know more. The head of a job
may say ``# ranks: 3``, ``# status: 1`` (the exit status that the job itself has, 0 unless said),
``# run: --hang-after 3`` (options of ``ddpdoctor run``), ``# fix: Load the state``: how the fix
begins that is printed, which the healed twin follows to the letter, and ``# needs: gpu`` or
``# needs: 2 gpus``: it is skipped where fewer are visible; or ``# needs: free cores`` or
``# needs: 5 free cores``: what it does wrong makes no difference where every rank lacks a core.
The twin of ``NAME.py`` is ``NAME_healed.py`` beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "tests" / "jobs" / "sick", ROOT / "sample_jobs" / "sick")
SICK = sorted(
    (path for folder in FOLDERS for path in folder.glob("*.py") if path.stem[-7:] != "_healed"),
    key=lambda path: path.stem,
)
HEALTHY = sorted((ROOT / "tests" / "jobs" / "healthy").glob("*.py"))

_MARK = re.compile(r"# (expect|or): (DDP\d+)(?: ranks? ([\d,]+))?$")


@dataclass(frozen=True)
class Said:
    """A finding, as far as a mark describes it."""

    code: str
    path: str
    line: int
    ranks: tuple[int, ...] | None

    def fits(self, mark: Said) -> bool:
        same = (self.code, self.path, self.line) == (mark.code, mark.path, mark.line)
        return same and mark.ranks in (None, self.ranks)


def marks(path: Path) -> list[list[Said]]:
    """What is expected: of each finding the places at which it may stand."""
    found: list[list[Said]] = []
    others: list[Said] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = _MARK.search(line)
        if match is not None:
            ranks = tuple(map(int, match[3].split(","))) if match[3] else None
            mark = Said(match[2], str(path), number, ranks)
            if match[1] == "or":
                others.append(mark)
            else:
                found.append([mark])
    for other in others:
        next(each for each in found if each[0].code == other.code).append(other)
    return found


def said(finding: Mapping[str, object]) -> Said:
    """A finding of ``--json``, to be held against the marks."""
    location = finding.get("location")
    place = location if isinstance(location, dict) else {}
    ranks = finding["ranks"]
    assert isinstance(ranks, list)
    return Said(
        str(finding["code"]), str(place.get("path")), int(place.get("line", 0)), tuple(ranks)
    )


def sick(name: str) -> Path:
    """The sick job of this name, wherever it is."""
    (found,) = (path for path in SICK if path.stem == name)
    return found


def healed(path: Path) -> Path:
    """The healthy twin of a sick job."""
    return path.with_name(f"{path.stem}_healed.py")


def head(path: Path, word: str, default: int) -> int:
    """A number in a job's head."""
    match = re.search(rf"^# {word}: (\d+)$", path.read_text(), re.MULTILINE)
    return int(match[1]) if match is not None else default


def options(path: Path) -> list[str]:
    """The options that a job wants ``ddpdoctor run`` to have."""
    match = re.search(r"^# run: (.+)$", path.read_text(), re.MULTILINE)
    return match[1].split() if match is not None else []


def sizes(path: Path) -> list[str]:
    """The numbers of ranks with which ``ddpdoctor parity`` runs a job, and its options, if any."""
    match = re.search(r"^# parity: ([\d,]+.*)$", path.read_text(), re.MULTILINE)
    return match[1].split() if match is not None else []


def fix(path: Path) -> str:
    """How the fix begins that a job's findings print; ``{}`` stands for what varies."""
    match = re.search(r"^# fix: (.+)$", path.read_text(), re.MULTILINE)
    return match[1] if match is not None else ""


def needed_gpus(path: Path) -> int:
    """How many GPUs a job needs."""
    match = re.search(r"^# needs: (?:(\d+) )?gpus?$", path.read_text(), re.MULTILINE)
    return int(match[1] or 1) if match is not None else 0


def needed_cores(path: Path) -> int:
    """How many cores with nothing else to do a job needs to be sick; 0 if that does not matter."""
    match = re.search(r"^# needs: (?:(\d+) )?free cores$", path.read_text(), re.MULTILINE)
    return int(match[1] or 1) if match is not None else 0


def standing(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of the lines of ``--json`` the findings that were right, in their order: what still holds at
    the end, and what was true until it was over.
    """
    withdrawn = {each.get("retracts") for each in lines if each.get("why") != "over"}
    return [
        dict(each)
        for number, each in enumerate(lines, 1)
        if number not in withdrawn and "retracts" not in each
    ]


def read(report: Path) -> list[dict[str, Any]]:
    """The lines of a ``--json`` file, but for the last one, which is the end of the run."""
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    return [each for each in lines if "event" not in each]


Kind = Literal["sick", "healed", "healthy"]


@dataclass(frozen=True)
class Verdict:
    """What was said of a job, held against what the job says about itself.

    Attributes:
        missing: The expected findings that were not made, each with the places where it may stand.
        others: The findings that no mark expects.
        as_wanted: A sick job has exactly the findings of its marks; a healed twin none, not even
            one that was withdrawn; a healthy job none but infos.
    """

    missing: list[list[Said]]
    others: list[dict[str, Any]]
    as_wanted: bool


def judged(kind: Kind, path: Path, lines: Sequence[Mapping[str, Any]]) -> Verdict:
    """Judge a job by the lines of its ``--json`` file."""
    expected = marks(path) if kind == "sick" else []
    heard = [(said(each), each) for each in standing(lines)]
    missing = [
        places
        for places in expected
        if not any(place.fits(mark) for place, _ in heard for mark in places)
    ]
    others = [
        each
        for place, each in heard
        if not any(place.fits(mark) for places in expected for mark in places)
    ]
    wanted = {
        "sick": bool(expected) and not missing and not others,
        "healed": not lines,
        "healthy": all(each["severity"] == "info" for each in lines if "retracts" not in each),
    }
    return Verdict(missing, others, wanted[kind])
