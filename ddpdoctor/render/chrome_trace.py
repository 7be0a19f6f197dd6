"""Write a run as a Chrome trace for Perfetto, merged with traces of torch.profiler.

Each rank is a process with tracks for steps, phases, waits for the DataLoader and collectives.
All times are on one clock (:func:`clock_offsets`), in microseconds from the start of the run. Only
durations are recorded within a step, so phases are laid out in their usual order.

A profiler trace names its rank (``distributedInfo``) if the process group was initialized.
Otherwise the process id or the file's name shows it. Its times count from ``baseTimeNanoseconds``.
Traces of older versions of torch lack that and hold microseconds since 1970.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from ddpdoctor import __version__
from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding
from ddpdoctor.core.formatting import json_text, shown, shown_json
from ddpdoctor.core.opening import integer
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.records.supervisor import FindingRecord, RankExitRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.ring import Collective
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.step_series import StepLog, split_backwards

# -- traces of torch.profiler

MAX_PROFILE_BYTES = 1 << 30  # Maximum size of a decompressed profiler trace in bytes

_PROFILE_SUFFIXES = (".json", ".json.gz")
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,6})", re.IGNORECASE)
_NUMBERS_PER_RANK = 1_000_000
"""Process numbers of the profiler trace of rank R begin at ``(R + 1) * _NUMBERS_PER_RANK``."""
_ARROWS_PER_RANK = 1 << 32  # The same for its arrows. JavaScript holds these numbers exactly.


@dataclass(frozen=True)
class Profile:
    """The profiler trace of one rank."""

    rank: int
    base: int  # Origin of its times, in Unix nanoseconds
    events: Sequence[JsonObject]


def read_profiles(directory: str, run: Run) -> list[Profile]:
    """Read the profiler traces in a directory and below.

    Raises:
        DoctorError: There is no trace, or one cannot be read or belongs to no rank of the run.
    """
    paths = sorted(
        each for each in Path(directory).rglob("*") if each.name.endswith(_PROFILE_SUFFIXES)
    )
    found = [profile for path in paths if (profile := _read_profile(path, run)) is not None]
    if not found:
        raise DoctorError(
            f"{directory} has no trace of torch.profiler",
            "name the folder that tensorboard_trace_handler or export_chrome_trace wrote to",
        )
    return found


def _read_profile(path: Path, run: Run) -> Profile | None:
    """Read a profiler trace. None if the file is other JSON."""
    try:
        data = opening.contents(path, MAX_PROFILE_BYTES, links=True)
        if path.name.endswith(".gz"):
            data = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data, MAX_PROFILE_BYTES)
        trace = opening.loads(data)
    except (OSError, ValueError, zlib.error, gzip.BadGzipFile) as error:
        raise DoctorError(f"cannot read {path}: {error}") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return None
    events = [each for each in trace["traceEvents"] if isinstance(each, dict)]
    rank = _profile_rank(path, trace, events, run)
    if rank is None:
        raise DoctorError(
            f"{path} belongs to no rank of the run", "put the rank into its name, as in rank0.json"
        )
    return Profile(rank, integer(trace, "baseTimeNanoseconds"), events)


def _profile_rank(path: Path, trace: JsonObject, events: list[JsonObject], run: Run) -> int | None:
    ranks = {rank.rank for rank in run.last}
    recorded = trace.get("distributedInfo")
    if isinstance(recorded, dict) and integer(recorded, "rank", -1) in ranks:
        return integer(recorded, "rank")
    pids = {rank.status.pid: rank.rank for rank in run.last if rank.status is not None}
    for event in events[:1000]:
        if isinstance(event.get("pid"), int) and event["pid"] in pids:
            return pids[event["pid"]]
    named = _RANK_IN_NAME.search(path.name)
    return int(named[1]) if named is not None and int(named[1]) in ranks else None


def profile_events(
    profiles: Sequence[Profile], zero: int, lead: Callable[[int], int]
) -> Iterator[JsonObject]:
    """Yield the events of profiler traces, on the clock of the run's trace.

    That clock starts at ``zero``, in Unix nanoseconds. ``lead`` returns the nanoseconds by which a
    rank's clock is ahead.
    """
    every = {profile.rank: _ProfileNumbers(profile.rank) for profile in profiles}
    for profile in profiles:
        shift = (profile.base - zero - lead(profile.rank)) / 1e3
        numbers = every[profile.rank]
        numbers.begin()
        for event in profile.events:
            yield from numbers.moved(event, shift)


class _ProfileNumbers:
    """Numbers for the processes, tracks and arrows of a rank, unique over all ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._processes: dict[str, int] = {}
        self._tracks: set[tuple[int, str]] = set()
        self._arrows: dict[str, int] = {}
        self._next_arrow = (rank + 1) * _ARROWS_PER_RANK

    def begin(self) -> None:
        """Begin another trace of the rank: its profiler writes one per cycle."""
        self._next_arrow += len(self._arrows)
        self._arrows.clear()

    def moved(self, event: JsonObject, shift: float) -> Iterator[JsonObject]:
        """Yield an event of that trace with unique numbers, after names that it introduces."""
        pid, tid = event.get("pid"), event.get("tid")
        if str(pid) not in self._processes:
            first = (self._rank + 1) * _NUMBERS_PER_RANK
            self._processes[str(pid)] = first + len(self._processes)
            if not isinstance(pid, int):
                # The id of a GPU, or another word, is not a number.
                name = self._name(str(pid or ""))
                yield _name("process_name", self._processes[str(pid)], 0, name)
        process = self._processes[str(pid)]
        track = tid if isinstance(tid, int) else zlib.crc32(str(tid).encode())
        if tid and not isinstance(tid, int) and (process, str(tid)) not in self._tracks:
            self._tracks.add((process, str(tid)))
            yield _name("thread_name", process, track, shown(str(tid)))
        moved: dict[str, Any] = shown_json(event, "\n")
        moved |= {"pid": process, "tid": track}
        if "id" in event:
            # Perfetto draws arrows for hexadecimal numbers only.
            number = self._next_arrow + len(self._arrows)
            moved["id"] = self._arrows.setdefault(str(event["id"]), number)
        if event.get("ph") == "M" and event.get("name") == "process_name":
            named = event.get("args")
            name = named.get("name", "") if isinstance(named, dict) else ""
            moved["args"] = {"name": self._name(f"{name} {pid}")}
        if isinstance(event.get("ts"), (int, float)):
            moved["ts"] = round(event["ts"] + shift, 3)
        yield moved

    def _name(self, what: str) -> str:
        return shown(f"rank {self._rank} profiler: {what.strip()}".rstrip(": "))


# -- the trace of a run

MAX_STEPS = 60_000
"""Maximum steps of all ranks, the newest of each. They take about 60 MB, which Perfetto opens
quickly.
"""

JOB, FIRST = 1, 10  # The process of the job as a whole, and of rank 0

STEPS, PHASES, DATA, COLLECTIVES = 1, 2, 3, 4  # The tracks of a rank

_PHASE_ORDER = ("data", "forward", "backward", "wait", "optimizer", "other")
_TRACKS = {STEPS: "steps", PHASES: "phases", DATA: "DataLoader waits", COLLECTIVES: "collectives"}

Event = dict[str, Any]


def write_trace(
    path: str, run: Run, found: Sequence[Finding], profiles: Sequence[Profile], zipped: bool
) -> int:
    """Write the trace with profiler traces merged in. Return its size in bytes.

    Raises:
        OSError: The file cannot be written.
    """
    each = MAX_STEPS // (len(run.last) or 1)
    newest = {
        rank.rank: StepLog(run.path / f"{rank_stem(rank.rank, rank.restart)}.jsonl").newest(each)
        for rank in run.last
    }
    steps = split_backwards(run.last, newest, lines=True)
    clock = _Clock(run, steps)
    facts = {
        "ddpdoctor": __version__,
        "run": shown(run.id),
        "clock offsets in ns": {shown(node): each for node, each in clock.ahead.items()},
    }
    with gzip.open(path, "wt", 6) if zipped else open(path, "w") as file:
        head = f'{{"displayTimeUnit":"ms","otherData":{json_text(facts)},"traceEvents":[\n'
        events = _events(run, found, steps, clock)
        for event in chain(events, profile_events(profiles, clock.zero, clock.lead)):
            file.write(head + json_text(event, separators=(",", ":")))
            head = ",\n"
        file.write("\n]}\n")
    return os.stat(path).st_size


# -- One clock

MIN_SHARED = 3  # Minimum number of steps that two nodes must share


def clock_offsets(
    ranks: Sequence[Rank], steps: Mapping[int, Sequence[StepRecord]]
) -> dict[str, int]:
    """Return how far each node's clock is ahead of the first rank's, in nanoseconds.

    An all-reduce ends on all ranks at nearly the same time, so the difference of the recorded ends
    is that of the clocks. Ranks of one node share a clock. The offset of a node that shares too few
    steps is 0.
    """
    ends: dict[str, dict[int, list[int]]] = {}
    for rank in ranks:
        of_node = ends.setdefault(rank.opened.host, {})
        for step in steps.get(rank.rank, ()):
            # The all-reduce ends before the optimizer and the rest of the step.
            reduced = step.start + step.data + step.forward + step.backward + step.wait
            of_node.setdefault(step.step, []).append(reduced)
    first = ranks[0].opened.host if ranks else ""
    reference = ends.get(first, {})
    found: dict[str, int] = {}
    for node, of_node in ends.items():
        shared = [median(of_node[n]) - median(reference[n]) for n in of_node if n in reference]
        known = node != first and len(shared) >= MIN_SHARED
        found[node] = round(median(shared)) if known else 0
    return found


class _Clock:
    """Converts timestamps of ranks into microseconds of one clock."""

    def __init__(self, run: Run, steps: Mapping[int, Sequence[StepRecord]]) -> None:
        self.ahead = clock_offsets(run.last, steps)
        self._of_rank = {r.rank: self.ahead.get(r.opened.host, 0) for r in run.last}
        starts = [each[0].start - self.lead(rank) for rank, each in steps.items() if each]
        started = integer(run.manifest, "started")
        self.zero = min([*starts, *([started] if started else [])], default=0)
        """The start of the trace in Unix nanoseconds."""

    def lead(self, rank: int) -> int:
        """Return the nanoseconds by which a rank's clock is ahead."""
        return self._of_rank.get(rank, 0)

    def at(self, stamp: int, rank: int | None = None) -> float:
        """Convert Unix nanoseconds of a rank, or of the first node, into microseconds."""
        return (stamp - self.zero - (0 if rank is None else self.lead(rank))) / 1e3


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
            yield from _step_slices(step, rank.rank, clock)
    yield from _collective_slices(run.last, clock)
    yield from _instants(run, found, clock)
    for begin, end in run.stalls:
        yield _slice("no progress", "hang", clock.at(begin), (end - begin) / 1e3, JOB, 1)


def _meta(kind: str, process: int, track: int) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track}


def _name(kind: str, process: int, track: int, text: str) -> Event:
    return {**_meta(kind, process, track), "args": {"name": text}}


def _slice(name: str, category: str, at: float, length: float, process: int, track: int) -> Event:
    return {
        "ph": "X", "name": name, "cat": category, "ts": round(at, 3), "dur": round(length, 3),
        "pid": process, "tid": track,
    }  # fmt: skip


def _step_slices(step: StepRecord, rank: int, clock: _Clock) -> Iterator[Event]:
    begin, process = clock.at(step.start, rank), FIRST + rank
    facts = {"own ms": step.own / 1e6, "wait ms": step.wait / 1e6, "epoch": step.epoch}
    facts |= {"loss": step.loss, "gradient norm": step.norm, "samples": step.samples}
    whole = _slice(f"step {step.step}", "step", begin, step.total / 1e3, process, STEPS)
    # JSON has no infinities.
    known = {k: v for k, v in facts.items() if v is not None and abs(v) < 1e300}
    yield {**whole, "args": known}
    at = begin
    for phase in _PHASE_ORDER:
        length = getattr(step, phase) / 1e3
        if length > 0:
            yield _slice(phase, "phase", at, length, process, PHASES)
            if phase == "data":
                yield _slice("wait for a batch", "dataloader", at, length, process, DATA)
        at += length


def _collective_slices(ranks: Iterable[Rank], clock: _Clock) -> Iterator[Event]:
    calls_of: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for rank in ranks:
        process = FIRST + rank.rank
        for call in rank.ring.collectives if rank.ring is not None else ():
            begin = clock.at(call.began, rank.rank)
            # A call that never ended is drawn until the last sign of life of its rank.
            ended = call.ended or max(call.began, rank.status.since if rank.status else 0)
            length = max(clock.at(ended, rank.rank) - begin, 1.0)
            name = shown(f"{call.name} #{call.sequence}" if call.sequence else call.name)
            event = _slice(name, "collective", begin, length, process, COLLECTIVES)
            yield {**event, "args": _collective_facts(call)}
            if call.sequence:
                calls_of[call.group, call.sequence].append((begin, process))
    for number, ((_, sequence), calls) in enumerate(sorted(calls_of.items()), 1):
        calls.sort()
        for place, (begin, process) in enumerate(calls if len(calls) > 1 else ()):
            kind = "s" if place == 0 else "f" if place == len(calls) - 1 else "t"
            yield {
                "ph": kind, "name": f"collective #{sequence}", "cat": "collective", "id": number,
                "ts": round(begin + 0.5, 3), "pid": process, "tid": COLLECTIVES, "bp": "e",
            }  # fmt: skip


def _collective_facts(call: Collective) -> dict[str, Any]:
    found = {
        "sequence": call.sequence, "group": call.group, "dtype": call.dtype, "reduce": call.reduce,
        "shape": list(call.shape), "root": call.root if call.root >= 0 else None,
        "line": call.site, "ended": None if call.ended else "never",
    }  # fmt: skip
    return {k: shown(v) if isinstance(v, str) else v for k, v in found.items() if v}


def _instants(run: Run, found: Sequence[Finding], clock: _Clock) -> Iterator[Event]:
    records = run.supervisor.of(FindingRecord)
    reported = {(each.code, each.ranks): each.time for each in records}
    for finding in found:
        # A finding that was not reported during the run is shown at the end.
        stamp = finding.moment or reported.get((finding.code, finding.ranks), run.taken)
        text = f"{finding.severity.label} {finding.code}: {finding.message}"
        facts = {"evidence": "; ".join(finding.evidence), "fix": finding.fix}
        for process in (JOB, *(FIRST + rank for rank in finding.ranks)):
            yield _instant(text, "finding", clock.at(stamp), process, facts)
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
