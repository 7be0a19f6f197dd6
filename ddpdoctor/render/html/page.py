"""Write the report of a run as one HTML file.

It contains the facts of the terminal report, the table of ranks, numbers over time, the merged
stacks, and gaps in the measurements. Times are seconds unless a name says otherwise. Tables of
numbers are packed (:func:`packed`).

The run's data is JSON in an inert element, and the script puts it on the page only as text. A
content security policy in the file forbids other scripts and styles, and any fetch.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import shlex
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from ddpdoctor import __version__
from ddpdoctor.core import opening
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import count, json_text, named, shown, shown_json, spans
from ddpdoctor.core.opening import integer
from ddpdoctor.diagnose.crashes.rank_endings import endings
from ddpdoctor.diagnose.hangs.hang_snapshot import hang_snapshot
from ddpdoctor.diagnose.speed.pace import WARM_UP
from ddpdoctor.render import console, reporter
from ddpdoctor.render.console import code_frame
from ddpdoctor.render.stack_text import frame_place, inner_frames, stacks_summary
from ddpdoctor.render.terminal import PHASE_COLOURS, SEVERITY_COLOURS, Colour
from ddpdoctor.run import code_version, vitals
from ddpdoctor.run.names import VITALS
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.records.supervisor import Frame, UnwatchedRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.step_series import PARTS, RankSeries, Series, series
from ddpdoctor.stacks import frames as frames_module
from ddpdoctor.stacks.frames import CUT, FOLDED, Code, Node, code_of_stacks, fold, merge, tail

# -- collect the content of the HTML report as JSON


MAX_TABLE_BYTES = 3_600_000
"""Maximum bytes of the tables over time in the file, which may have five million bytes."""

_BYTES_PER_CELL = (len(PARTS) + 1) * 2 * 4 / 3
"""A cell has the mean of each part and the longest step, in 16 bits each, as base64."""
_BYTES_PER_VALUE = 4 * 4 / 3


def report_content(
    run: Run, findings: Sequence[Finding], *, live: bool, remark: str
) -> dict[str, Any]:
    """Return the report on a run. ``remark`` is an additional sentence about its end."""
    most = int(MAX_TABLE_BYTES / (_BYTES_PER_CELL + 2 * _BYTES_PER_VALUE))
    steps = series(run, run.last, most)
    firsts = [
        each.starts[0] for each in steps.ranks if each.starts and not math.isnan(each.starts[0])
    ]
    started = (integer(run.manifest, "started") or min(firsts, default=0)) / 1e9
    written = console.written_before(run)
    return {
        "title": run.id,
        "verdict": _verdict(run, findings, live),
        "summary": [
            *reporter.summary_lines(run),
            *([remark] if remark else []),
            *(["the run is live; these are the findings so far"] if live else []),
            reporter.findings_count(findings),
        ],
        "findings": [finding_content(each, written) for each in findings],
        "ranks": rank_rows(run, run.last, findings, steps),
        "series": _series(steps, started),
        "vitals": vitals.vitals_curves(run.path, run.restarts[-1], started),
        "hangs": [
            [round(each / 1e9 - started, 3) for each in (begin, end)] for begin, end in run.stalls
        ],
        "stacks": stack_tree(run),
        "environment": environment(run),
        "gaps": list(measurement_gaps(run, steps)),
        "made": f"ddpdoctor {__version__}, {date_and_time(time.time_ns())}",
    }


def _verdict(run: Run, findings: Sequence[Finding], live: bool) -> dict[str, str]:
    """Return the first sentence: the worst finding, or how the run ended."""
    if findings and findings[0].severity > Severity.INFO:
        worst = findings[0]
        return {"level": worst.severity.label, "text": worst.message, "code": worst.code}
    status = run.exit_status
    if live:
        return {"level": "info", "text": "The run is live, and nothing wrong was found so far."}
    if status == 0:
        return {"level": "good", "text": "The job succeeded, and nothing wrong was found."}
    how = next(iter(reporter.summary_lines(run)), "")
    level = "warning" if run.stopped_at is not None or status is None else "error"
    return {"level": level, "text": f"No cause was found: {how}."}


def finding_content(finding: Finding, written: float) -> dict[str, Any]:
    """Return a finding. ``written`` is the time after which source lines may have changed."""
    at = finding.location
    return {
        "code": finding.code,
        "severity": finding.severity.label,
        "message": finding.message,
        "ranks": list(finding.ranks),
        "who": named(finding.ranks) if finding.ranks else "the job",
        "place": "" if at is None else f"{console.shown_path(at.path)}:{at.line}",
        "frame": [list(row) for row in code_frame(finding, written)],
        "calls": console.user_calls(finding),
        "evidence": list(finding.evidence),
        "fix": finding.fix,
        "paste": finding.paste,
    }


# -- gaps in the measurements, so that they are not mistaken for good news


def measurement_gaps(run: Run, steps: Series) -> Iterator[str]:
    """Yield the gaps of a run's records with their reasons, as sentences without a full stop."""
    for unwatched in run.supervisor.of(UnwatchedRecord):
        yield f"ranks were not watched: {unwatched.why}"
    seen = {rank.rank for rank in run.last}
    absent = set(range(min(run.world_size, 1 << 17))) - seen
    if seen and absent:
        yield f"{named(absent)}: no records here; a run directory only has the ranks of one node"
    if len(run.restarts) > 1:
        yield "steps of attempts before the last one: the charts show the last"
    yield from _step_gaps(steps)
    if not (run.path / VITALS).exists():
        yield "memory and GPUs over time: not recorded in this run"
    elif not any(run.path.glob("gpus-*.json")):
        yield "GPUs: no NVML on this machine"
    lost = sum(rank.status.dropped for rank in run.last if rank.status is not None)
    if lost:
        yield f"{count(lost, 'record')} that did not fit or could not be written"
    for line in run.unreadable:
        yield f"not read: {line}"
    for each in run.hang.ranks if run.hang is not None else ():
        if each.flight_trouble:
            yield f"the Flight Recorder of rank {each.rank}: {each.flight_trouble}"
    faults = [each for rank in run.ranks for each in rank.records.of(FaultRecord)]
    for fault in (*faults, *run.supervisor.of(FaultRecord))[:10]:
        yield f"{fault.hook or fault.part} of ddpdoctor failed and was switched off: {fault.error}"


def _step_gaps(steps: Series) -> Iterator[str]:
    if not steps.ranks:
        yield "steps: no rank closed one"
        return
    if steps.edges[0]:
        yield f"steps before {steps.edges[0]}: the journals have room for --journal-mb megabytes"
    if steps.sampled:
        yield "each step: the run is long, so a few steps were read for each column of the charts"
    read, split = (sum(getattr(each, name) for each in steps.ranks) for name in ("steps", "split"))
    unsplit = sum(len(each.unsplit) for each in steps.ranks)
    if len(steps.ranks) == 1:
        # A single rank never waits for others.
        pass
    elif unsplit == steps.columns * len(steps.ranks):
        yield "the wait for other ranks: it is part of backward, as DDP timed no step"
    elif split < read:
        yield (
            f"the wait for other ranks in {read - split} of {read} steps, which DDP did not time: "
            "columns without a timed one show how much longer a backward took than the shortest"
        )
    if not _any_known([rank.loss for rank in steps.ranks]):
        yield "the loss: no backward began with a tensor of one element"
    if not _any_known([rank.norm for rank in steps.ranks]):
        yield "gradient norms: they are known where the job calls clip_grad_norm_"


# -- the table of ranks


def rank_rows(
    run: Run, ranks: Sequence[Rank], findings: Sequence[Finding], steps: Series
) -> list[dict[str, Any]]:
    """Return a row for each rank: its identity, its end, the parts of its steps.

    Unknown values are absent. Times are seconds, means over the run.
    """
    blamed = {
        rank: finding.code
        for finding in reversed(findings)
        if finding.severity > Severity.INFO
        for rank in finding.ranks
    }
    ended = {each.rank: each.text for each in reversed(endings(run, run.restarts[-1]))}
    series = {each.rank: each for each in steps.ranks}
    found = []
    for rank in ranks:
        status = rank.status
        row = {
            "rank": rank.rank,
            "node": rank.opened.host,
            "local": rank.opened.local_rank,
            "pid": status.pid if status is not None else rank.opened.pid,
            "state": ended.get(rank.rank) or _rank_state(rank),
            "failed": rank.rank in ended or None,
            "finding": blamed.get(rank.rank),
            "steps": status.step if status is not None else None,
            "gpu": next((each.device_name for each in rank.records.of(DdpRecord)), ""),
            "rss": status.rss if status is not None else None,
            "peak": status.peak if status is not None else None,
            **_rank_times(series.get(rank.rank), steps.edges),
        }
        found.append({key: value for key, value in row.items() if value or value == 0})
    return found


def _rank_state(rank: Rank) -> str:
    if rank.ended:
        return "ended"
    if rank.exit is not None:
        return "exited"
    if rank.status is None:
        return ""
    where = f" at {rank.status.site.rpartition('/')[2]}" if rank.status.site else ""
    return f"{rank.status.phase.label}{where}"


def _rank_times(series: RankSeries | None, edges: Sequence[int]) -> dict[str, Any]:
    if series is None or not series.steps:
        return {}
    steady = [place for place, edge in enumerate(edges[:-1]) if edge >= WARM_UP]

    def mean(values: Sequence[float]) -> float:
        # Exclude the warm-up if there are other steps.
        known = [values[place] for place in steady if not math.isnan(values[place])]
        return fmean(known or [value for value in values if not math.isnan(value)] or [0.0])

    means = [mean(values) / 1e9 for values in series.parts]
    longest = max(value for value in series.worst if not math.isnan(value))
    return {
        "parts": [round(each, 7) for each in means],
        "own": round(sum(means[: PARTS.index("wait")]), 7),
        "longest": round(longest / 1e9, 7),
        "unsplit": len(series.unsplit) == len(series.worst) or None,
    }


# -- the stacks of all ranks at the hang, or the last ones taken, as a merged tree


def stack_tree(run: Run) -> dict[str, Any] | None:
    """Return the tree with its time. None if no stacks were taken."""
    hang = hang_snapshot(run)
    if hang is not None:
        stacks = [each.stacks for each in hang.ranks if each.stacks is not None]
        when, what = hang.record.time, "while the job made no progress"
    else:
        kept = frames_module.load_stacks(run.path)
        stacks = list(kept.stacks) if kept is not None else []
        when, what = (kept.time if kept is not None else 0), "taken last"
    if not stacks:
        return None
    merged = merge(stacks, fold)
    code = code_of_stacks(stacks, integer(run.manifest, "started"))
    mains = {each.rank: main.frames for each in stacks if (main := each.main) is not None}
    troubles: dict[str, list[int]] = defaultdict(list)
    for each in merged.missing:
        troubles[each.trouble or "no main thread"].append(each.rank)
    at = time.strftime("%H:%M:%S", time.localtime(when / 1e9))
    return {
        "head": f"{what}, at {at}: {stacks_summary(merged)}",
        "roots": [_tree_node(root, code, mains) for root in merged.roots],
        "missing": [[spans(ranks), trouble] for trouble, ranks in troubles.items()],
    }


def _tree_node(node: Node, code: Code, mains: Mapping[int, Sequence[Frame]]) -> dict[str, Any]:
    deeper = {rank for each in node.children for rank in each.ranks}
    ends: dict[str, list[int]] = defaultdict(list)
    for rank in node.ranks:
        if rank not in deeper and (below := tail(mains[rank])):
            ends[inner_frames(below)].append(rank)
    return {
        "ranks": spans(node.ranks),
        "count": len(node.ranks),
        "odd": node.odd,
        "frames": [_tree_frame(frame, code) for frame in node.frames],
        "ends": [[spans(ranks), text] for text, ranks in ends.items()],
        "children": [_tree_node(each, code, mains) for each in node.children],
    }


def _tree_frame(frame: Frame, code: Code) -> list[str]:
    """Return place, function and source of a frame, or a sentence for folded frames."""
    if frame == CUT:
        return ["the frames above are not known"]
    if frame.function == FOLDED:
        return [f"in {frame.path}"]
    return [frame_place(frame), frame.function, code.get(frame, "")]


# -- numbers over time


def _series(steps: Series, started: float) -> dict[str, Any]:
    times = steps.ranks[0].starts if steps.ranks else []
    return {
        "edges": steps.edges,
        "ranks": [each.rank for each in steps.ranks],
        "parts": list(PARTS),
        "sampled": steps.sampled,
        "times": [None if math.isnan(each) else round(each / 1e9 - started, 3) for each in times],
        "cells": packed(
            value
            for each in steps.ranks
            for values in (*each.parts, each.worst)
            for value in values
        ),
        "loss": _curves([each.loss for each in steps.ranks]),
        "norm": _curves([each.norm for each in steps.ranks]),
    }


def packed(durations: Iterable[float]) -> str:
    """Pack durations in nanoseconds into 16 bits each, as base64.

    0 is unknown (NaN), n is 2 ** ((n - 1) / 2048) - 1 us. So a microsecond and an hour both keep
    three digits.
    """
    scaled = (1 + round(2048 * math.log2(1 + each / 1e3)) if each >= 0 else 0 for each in durations)
    return _base64(array("H", (min(each, 0xFFFF) for each in scaled)))


def _any_known(curves: Sequence[array[float]]) -> bool:
    return not all(math.isnan(value) for curve in curves for value in curve)


def _curves(curves: Sequence[array[float]]) -> str:
    """Pack values as 32-bit floats in base64, NaN where unknown. Empty if all are unknown."""
    if not _any_known(curves):
        return ""
    most = 3.4e38
    clipped = (
        value if math.isnan(value) else max(-most, min(most, value))
        for curve in curves
        for value in curve
    )
    return _base64(array("f", clipped))


def _base64(values: array[Any]) -> str:
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


# -- words


def environment(run: Run) -> list[list[str]]:
    """Return the command, the machine and the versions, as pairs of a name and a text."""
    manifest = run.manifest
    kept = code_version.read(run.path)
    opened = next((rank.opened for rank in run.last if rank.opened.versions), None)
    given = manifest.get("versions")
    versions = {**(given if isinstance(given, dict) else {}), **(opened.versions if opened else {})}
    hosts = sorted({rank.opened.host for rank in run.last if rank.opened.host})
    words = run.command
    found = [
        ("run", run.id),
        ("records", str(run.path)),
        ("command", shlex.join(words)),
        ("directory", str(manifest.get("cwd", ""))),
        ("script", reporter.job_script(run) if words else ""),
        ("commit", kept.commit if kept is not None else ""),
        ("started", date_and_time(integer(manifest, "started"))),
        ("host", ", ".join(hosts) or str(manifest.get("host", ""))),
        ("backend", opened.backend if opened is not None else ""),
        ("launcher", str(manifest.get("launcher", ""))),
        *((f"{name} version", str(text)) for name, text in sorted(versions.items())),
    ]
    attempts = len(run.restarts)
    if attempts > 1:
        found.append(("attempts", f"{attempts}; numbers are of the last one"))
    return [[name, text] for name, text in found if text]


def date_and_time(nanoseconds: int) -> str:
    """Return a local time as text. Empty for 0."""
    if not nanoseconds:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(nanoseconds / 1e9))


# -- put the HTML report together: template, style, scripts and data in one file


SCRIPTS = ("elements.js", "series.js", "charts.js", "heatmap.js", "sections.js", "page.js")
"""The scripts in the order in which they run, after the plotting library."""

_LIBRARY = "uplot/"


@lru_cache(maxsize=32)
def _file(name: str) -> str:
    return opening.contents(Path(__file__).parent / name, opening.MOST_SOURCE, links=True).decode()


def page(content: dict[str, Any]) -> str:
    """Return the HTML file for a report."""
    style = "\n".join((_colours(), _file(_LIBRARY + "uPlot.min.css"), _file("page.css")))
    library = _file(_LIBRARY + "uPlot.iife.min.js")
    script = "\n".join((library, *map(_file, SCRIPTS)))
    parts = {
        "policy": (
            f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        "title": html.escape(shown(f"{content['title']} - ddpdoctor")),
        "verdict": html.escape(shown(content["verdict"]["text"])),
        "license": _file(_LIBRARY + "LICENSE"),
        "style": style,
        "script": script,
        # The JSON must not end the element that contains it.
        "data": json_text(shown_json(content, "\n\t"), separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026"),
    }
    # Split the template before inserting the parts, so that no part is taken for a placeholder.
    pieces = _file("page.html").split("%%")
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    return "".join(pieces)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _colours() -> str:
    """Return the colours of phases and severities as variables, for light, dark and print."""

    def variables(which: int) -> str:
        named: dict[str, Colour] = {**PHASE_COLOURS, **SEVERITY_COLOURS}
        return "".join(f"--{name}:{colour[which]};" for name, colour in named.items())

    light, dark = variables(0), variables(1)
    return (
        f":root{{{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f"@media screen{{:root[data-theme=dark]{{{dark}}}}}"
    )
