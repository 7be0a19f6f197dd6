"""What the HTML report says, as JSON: the same facts as the report in a terminal, and the numbers.

Times are seconds unless a name says otherwise. Tables of numbers are packed (:func:`packed`).
"""

from __future__ import annotations

import base64
import math
import shlex
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from ddpdoctor import __version__
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.opening import integer
from ddpdoctor.core.ranks import named
from ddpdoctor.render import console, summary
from ddpdoctor.render.code_frames import code_frame
from ddpdoctor.render.html import gaps, rank_table, stack_tree
from ddpdoctor.render.report import script
from ddpdoctor.run import code, vitals
from ddpdoctor.run.records.supervisor import HangOverRecord, HangRecord
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.step_series import PARTS, RankSeries, Series, series

MOST_BYTES = 3_600_000
"""Bytes that the tables over time take in the file, of the five million that it may have."""

_PER_CELL = (len(PARTS) + 1) * 2 * 4 / 3
"""Bytes of a cell: a parts' mean each, and the longest step, in 16 bits, as text."""
_PER_CURVE = 4 * 4 / 3


def content(run: Run, findings: Sequence[Finding], *, live: bool, remark: str) -> dict[str, Any]:
    """The report on a run.

    Args:
        run: The run.
        findings: What was found, worst first.
        live: Whether it still runs.
        remark: What there is to say about how the run ended; may be empty.
    """
    attempt = run.last
    most = int(MOST_BYTES / (_PER_CELL + 2 * _PER_CURVE))
    steps = series(run, attempt, most)
    started = _started(run, steps)
    return {
        "title": str(run.manifest.get("id") or run.path.name),
        "verdict": _verdict(run, findings, live),
        "summary": [
            *summary.lines(run),
            *([remark] if remark else []),
            *(["the run is live; these are the findings so far"] if live else []),
            summary.count(findings),
        ],
        "findings": [_finding(each, console.written_before(run)) for each in findings],
        "ranks": rank_table.rows(run, attempt, findings, steps),
        "series": _series(steps, started),
        "vitals": vitals.content(run.path, run.restarts[-1], started),
        "hangs": _hangs(run, started),
        "stacks": stack_tree.content(run),
        "environment": environment(run),
        "gaps": list(gaps.gaps(run, steps)),
        "made": f"ddpdoctor {__version__}, {_when(time.time_ns())}",
    }


def _verdict(run: Run, findings: Sequence[Finding], live: bool) -> dict[str, str]:
    """The first sentence: the worst finding, whole; without one, how the run ended."""
    if findings and findings[0].severity > Severity.INFO:
        worst = findings[0]
        return {"level": worst.severity.label, "text": worst.message, "code": worst.code}
    status = run.exit_status
    if live:
        return {"level": "info", "text": "The run is live, and nothing wrong was found so far."}
    if status == 0:
        return {"level": "good", "text": "The job succeeded, and nothing wrong was found."}
    how = next(iter(summary.lines(run)), "")
    level = "warning" if run.stopped_at is not None or status is None else "error"
    return {"level": level, "text": f"No cause was found: {how}."}


def _finding(finding: Finding, written: float) -> dict[str, Any]:
    at = finding.location
    return {
        "code": finding.code,
        "severity": finding.severity.label,
        "message": finding.message,
        "ranks": list(finding.ranks),
        "who": named(finding.ranks) if finding.ranks else "the job",
        "place": "" if at is None else f"{console.shown_path(at.path)}:{at.line}",
        "frame": [list(row) for row in code_frame(finding, written)],
        "calls": console.calls(finding),
        "evidence": list(finding.evidence),
        "fix": finding.fix,
        "paste": finding.paste,
    }


# -- numbers over time


def _started(run: Run, steps: Series) -> float:
    """Unix seconds from which on time is counted."""
    started = integer(run.manifest, "started")
    firsts = [each.starts[0] for each in steps.ranks if each.starts]
    return (started or min((each for each in firsts if each == each), default=0)) / 1e9


def _series(steps: Series, started: float) -> dict[str, Any]:
    first = steps.ranks[0] if steps.ranks else None
    times = first.starts if first is not None else []
    return {
        "edges": steps.edges,
        "ranks": [each.rank for each in steps.ranks],
        "parts": list(PARTS),
        "sampled": steps.sampled,
        "times": [round(each / 1e9 - started, 3) if each == each else None for each in times],
        "cells": packed(value for each in steps.ranks for value in _cells(each)),
        "loss": _curves([each.loss for each in steps.ranks]),
        "norm": _curves([each.norm for each in steps.ranks]),
    }


def _cells(rank: RankSeries) -> Iterable[float]:
    for values in (*rank.parts, rank.worst):
        yield from values


def packed(durations: Iterable[float]) -> str:
    """Durations as 16 bits each, in base64: 0 is unknown, n is 2 ** ((n - 1) / 2048) - 1 us.

    So a microsecond and an hour both keep three digits. Unknown is NaN.
    """
    scaled = (1 + round(2048 * math.log2(1 + each / 1e3)) if each >= 0 else 0 for each in durations)
    return _base64(array("H", (min(each, 0xFFFF) for each in scaled)))


def _curves(curves: Sequence[array[float]]) -> str:
    """Values as 32-bit floats in base64, NaN where nothing is known; empty if nothing is."""
    if not any(value == value for curve in curves for value in curve):
        return ""
    most = 3.4e38
    return _base64(
        array("f", (max(-most, min(most, v)) if v == v else v for curve in curves for v in curve))
    )


def _base64(values: array[Any]) -> str:
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


# -- words


def _hangs(run: Run, started: float) -> list[list[float]]:
    """When the job made no progress: seconds from the start, from and until."""
    found: list[list[float]] = []
    for each in run.supervisor:
        if isinstance(each, HangRecord):
            begin = each.time / 1e9 - started - each.seconds
            end = each.time / 1e9 - started
            if found and begin <= found[-1][1]:
                found[-1][1] = end
            else:
                found.append([begin, end])
        elif isinstance(each, HangOverRecord) and found:
            found[-1][1] = each.time / 1e9 - started
    return [[round(begin, 3), round(end, 3)] for begin, end in found]


def environment(run: Run) -> list[list[str]]:
    """What ran, where, with which versions: pairs of a name and a text."""
    manifest = run.manifest
    kept = code.read(run.path)
    opened = next((rank.opened for rank in run.last if rank.opened.versions), None)
    given = manifest.get("versions")
    versions = {**(given if isinstance(given, dict) else {}), **(opened.versions if opened else {})}
    hosts = sorted({rank.opened.host for rank in run.last if rank.opened.host})
    command = manifest.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    found = [
        ("run", str(manifest.get("id") or run.path.name)),
        ("records", str(run.path)),
        ("command", shlex.join(words)),
        ("directory", str(manifest.get("cwd", ""))),
        ("script", script(run) if words else ""),
        ("commit", kept.commit if kept is not None else ""),
        ("started", _when(integer(manifest, "started"))),
        ("host", ", ".join(hosts) or str(manifest.get("host", ""))),
        ("backend", opened.backend if opened is not None else ""),
        ("launcher", str(manifest.get("launcher", ""))),
        *((f"{name} version", str(text)) for name, text in sorted(versions.items())),
    ]
    attempts = len(run.restarts)
    if attempts > 1:
        found.append(("attempts", f"{attempts}; numbers are of the last one"))
    return [[name, text] for name, text in found if text]


def _when(moment: int) -> str:
    if not moment:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(moment / 1e9))
