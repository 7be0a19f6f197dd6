"""A run as a Chrome trace: what ui.perfetto.dev, chrome://tracing and trace_processor read.

Each rank is a process with tracks for steps, phases, waits for the DataLoader and collectives. All
times are of one clock (`ddpdoctor.analysis.clocks`), microseconds from the start of the run. Within
a step only durations are recorded, so phases are laid out in their usual order.
"""

from __future__ import annotations

import gzip
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddpdoctor import __version__
from ddpdoctor.analysis.clocks import offsets
from ddpdoctor.core.control_characters import json_text, shown
from ddpdoctor.core.finding import Finding
from ddpdoctor.core.opening import integer
from ddpdoctor.render.profiler_traces import Profile, merged
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.records.supervisor import (
    FindingRecord,
    HangOverRecord,
    HangRecord,
    RankExitRecord,
)
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.ring import Collective
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.step_series import newest_steps
from ddpdoctor.run.waits import split

MOST_STEPS = 60_000
"""Steps of all ranks, the newest of each: some 60 MB, which Perfetto still opens at once."""

JOB = 1
"""The process of what concerns the job as a whole; rank R is ``FIRST + R``."""
FIRST = 10
STEPS, PHASES, DATA, COLLECTIVES = 1, 2, 3, 4
"""The tracks of a rank."""

_ORDER = ("data", "forward", "backward", "wait", "optimizer", "other")
_TRACKS = {STEPS: "steps", PHASES: "phases", DATA: "DataLoader waits", COLLECTIVES: "collectives"}

Event = dict[str, Any]


def write(
    path: str, run: Run, found: Sequence[Finding], profiles: Sequence[Profile], zipped: bool
) -> int:
    """Write the trace into a file, event by event; its size in bytes.

    Args:
        path: The file.
        run: The run.
        found: What was found.
        profiles: Traces of torch.profiler to merge in (`profiler_traces.read`).
        zipped: Compress it with gzip.

    Raises:
        OSError: It cannot be written.
    """
    each = MOST_STEPS // (len(run.last) or 1)
    newest = {rank.rank: newest_steps(run.path, rank, each) for rank in run.last}
    steps = split(run.last, newest, lines=True)
    clock = _Clock(run, steps)
    facts = {
        "ddpdoctor": __version__,
        "run": shown(str(run.manifest.get("id") or run.path.name)),
        "clock offsets in ns": {shown(node): each for node, each in clock.ahead.items()},
    }
    with gzip.open(path, "wt", 6) if zipped else open(path, "w") as file:
        head = f'{{"displayTimeUnit":"ms","otherData":{json_text(facts)},"traceEvents":[\n'
        for event in _events(run, found, steps, clock):
            file.write(head + json_text(event, separators=(",", ":")))
            head = ",\n"
        for event in merged(profiles, clock.zero, clock.behind):
            file.write(head + json_text(event, separators=(",", ":")))
        file.write("\n]}\n")
    return os.stat(path).st_size


class _Clock:
    """Makes microseconds of one clock of the moments that ranks wrote down."""

    def __init__(self, run: Run, steps: Mapping[int, Sequence[StepRecord]]) -> None:
        self.ahead = offsets(run.last, steps)
        self._of_rank = {r.rank: self.ahead.get(r.opened.host, 0) for r in run.last}
        moments = [each[0].start - self.behind(rank) for rank, each in steps.items() if each]
        started = integer(run.manifest, "started")
        self.zero = min([*moments, *([started] if started else [])], default=0)
        """Unix nanoseconds at which the trace begins."""

    def behind(self, rank: int) -> int:
        """Nanoseconds to take off the moments of a rank."""
        return self._of_rank.get(rank, 0)

    def at(self, moment: int, rank: int | None = None) -> float:
        """Microseconds of a moment in Unix nanoseconds; those of the job are the first node's."""
        return (moment - self.zero - (0 if rank is None else self.behind(rank))) / 1e3


def _events(
    run: Run, found: Sequence[Finding], steps: Mapping[int, Sequence[StepRecord]], clock: _Clock
) -> Iterator[Event]:
    yield _name("process_name", JOB, 0, "job")
    yield _name("thread_name", JOB, 1, "findings and hangs")
    for rank in run.last:
        process = FIRST + rank.rank
        node = f" on {rank.opened.host}" if rank.opened.host else ""
        yield _name("process_name", process, 0, shown(f"rank {rank.rank}{node}"))
        yield {**_meta("process_sort_index", process, 0), "args": {"sort_index": rank.rank}}
        for track, label in _TRACKS.items():
            yield _name("thread_name", process, track, label)
        for step in steps[rank.rank]:
            yield from _step(step, rank.rank, clock)
    yield from _collectives(run.last, clock)
    yield from _instants(run, found, clock)
    yield from _hangs(run, clock)


def _meta(kind: str, process: int, track: int) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track}


def _name(kind: str, process: int, track: int, text: str) -> Event:
    return {**_meta(kind, process, track), "args": {"name": text}}


def _slice(name: str, category: str, at: float, length: float, process: int, track: int) -> Event:
    return {
        "ph": "X", "name": name, "cat": category, "ts": round(at, 3), "dur": round(length, 3),
        "pid": process, "tid": track,
    }  # fmt: skip


def _step(step: StepRecord, rank: int, clock: _Clock) -> Iterator[Event]:
    begin, process = clock.at(step.start, rank), FIRST + rank
    facts = {"own ms": step.own / 1e6, "wait ms": step.wait / 1e6, "epoch": step.epoch}
    facts |= {"loss": step.loss, "gradient norm": step.norm, "samples": step.samples}
    whole = _slice(f"step {step.step}", "step", begin, step.total / 1e3, process, STEPS)
    # Infinities are no JSON.
    known = {k: v for k, v in facts.items() if v is not None and abs(v) < 1e300}
    yield {**whole, "args": known}
    at = begin
    for phase in _ORDER:
        length = getattr(step, phase) / 1e3
        if length > 0:
            yield _slice(phase, "phase", at, length, process, PHASES)
            if phase == "data":
                yield _slice("wait for a batch", "dataloader", at, length, process, DATA)
        at += length


# -- collectives, and the arrows between those that belong together


def _collectives(ranks: Iterable[Rank], clock: _Clock) -> Iterator[Event]:
    together: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for rank in ranks:
        process = FIRST + rank.rank
        for call in rank.ring.collectives if rank.ring is not None else ():
            begin = clock.at(call.began, rank.rank)
            # What never ended is drawn to the last that is known of its rank.
            ended = call.ended or max(call.began, rank.status.since if rank.status else 0)
            length = max(clock.at(ended, rank.rank) - begin, 1.0)
            name = shown(f"{call.name} #{call.sequence}" if call.sequence else call.name)
            event = _slice(name, "collective", begin, length, process, COLLECTIVES)
            yield {**event, "args": _facts(call)}
            if call.sequence:
                together[call.group, call.sequence].append((begin, process))
    for number, ((_, sequence), calls) in enumerate(sorted(together.items()), 1):
        calls.sort()
        for place, (begin, process) in enumerate(calls if len(calls) > 1 else ()):
            kind = "s" if place == 0 else "f" if place == len(calls) - 1 else "t"
            yield {
                "ph": kind, "name": f"collective #{sequence}", "cat": "collective", "id": number,
                "ts": round(begin + 0.5, 3), "pid": process, "tid": COLLECTIVES, "bp": "e",
            }  # fmt: skip


def _facts(call: Collective) -> dict[str, Any]:
    found = {
        "sequence": call.sequence, "group": call.group, "dtype": call.dtype, "reduce": call.reduce,
        "shape": list(call.shape), "root": call.root if call.root >= 0 else None,
        "line": call.site, "ended": None if call.ended else "never",
    }  # fmt: skip
    return {k: shown(v) if isinstance(v, str) else v for k, v in found.items() if v}


# -- moments


def _instants(run: Run, found: Sequence[Finding], clock: _Clock) -> Iterator[Event]:
    records = run.supervisor.of(FindingRecord)
    reported = {(each.code, each.ranks): each.time for each in records}
    for finding in found:
        # One that no live run reported is known at the end.
        moment = finding.moment or reported.get((finding.code, finding.ranks), run.taken)
        text = f"{finding.severity.label} {finding.code}: {finding.message}"
        facts = {"evidence": "; ".join(finding.evidence), "fix": finding.fix}
        for process in (JOB, *(FIRST + rank for rank in finding.ranks)):
            yield _instant(text, "finding", clock.at(moment), process, facts)
    for rank in run.last:
        for error in rank.records.of(ErrorRecord):
            at = clock.at(error.time, rank.rank)
            yield _instant(f"raised {error.exception}", "end", at, FIRST + rank.rank, {})
    for gone in run.supervisor.of(RankExitRecord):
        if gone.restart == run.restarts[-1]:
            name = f"exit status {gone.status}"
            yield _instant(name, "end", clock.at(gone.time), FIRST + gone.rank, {})


def _instant(name: str, category: str, at: float, process: int, facts: dict[str, str]) -> Event:
    return {
        "ph": "i", "s": "p", "name": shown(name), "cat": category, "ts": round(at, 3),
        "pid": process, "tid": 1, "args": {key: shown(text) for key, text in facts.items()},
    }  # fmt: skip


def _hangs(run: Run, clock: _Clock) -> Iterator[Event]:
    """A slice on the job's track for each time in which no rank moved."""
    begun: tuple[float, float] | None = None
    for each in run.supervisor:
        if isinstance(each, HangRecord):
            since = clock.at(each.time) - each.seconds * 1e6
            begun = (begun[0] if begun else since, clock.at(each.time))
        elif isinstance(each, HangOverRecord) and begun is not None:
            yield _slice("no progress", "hang", begun[0], clock.at(each.time) - begun[0], JOB, 1)
            begun = None
    if begun is not None:
        yield _slice("no progress", "hang", begun[0], begun[1] - begun[0], JOB, 1)
