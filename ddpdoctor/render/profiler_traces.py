"""Traces of torch.profiler, moved onto the clock and beside the ranks of a run's own trace.

Which rank a trace is of stands in it (``distributedInfo``) where the process group was initialized;
else the process id or the file's name tells. Times count from ``baseTimeNanoseconds``, which traces
of older versions of torch do not have: they hold microseconds since 1970.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.control_characters import shown
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import integer
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.snapshot import Run

MOST_BYTES = 1 << 30
"""Bytes of a trace, decompressed."""

_NAMES = (".json", ".json.gz")
_RANK = re.compile(r"rank[-_]?(\d{1,6})", re.IGNORECASE)
_PLACE = 1_000_000
"""Process numbers of the trace of rank R begin at ``(R + 1) * _PLACE``."""
_ARROWS = 1 << 32
"""Numbers of its arrows, in the same way; JavaScript holds them exactly."""


@dataclass(frozen=True)
class Profile:
    """The trace of one rank."""

    rank: int
    base: int
    """Unix nanoseconds from which its times count."""
    events: Sequence[JsonObject]


def read(directory: str, run: Run) -> list[Profile]:
    """The traces in a directory and below.

    Raises:
        DoctorError: There is none, one cannot be read, or belongs to no rank of the run.
    """
    paths = sorted(each for each in Path(directory).rglob("*") if each.name.endswith(_NAMES))
    found = [profile for path in paths if (profile := _profile(path, run)) is not None]
    if not found:
        raise DoctorError(
            f"{directory} has no trace of torch.profiler",
            "name the folder that tensorboard_trace_handler or export_chrome_trace wrote to",
        )
    return found


def _profile(path: Path, run: Run) -> Profile | None:
    """A trace; None if the file is another JSON."""
    try:
        data = opening.contents(path, MOST_BYTES, links=True)
        if path.name.endswith(".gz"):
            data = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data, MOST_BYTES)
        trace = opening.loads(data)
    except (OSError, ValueError, zlib.error, gzip.BadGzipFile) as error:
        raise DoctorError(f"cannot read {path}: {error}") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return None
    events = [each for each in trace["traceEvents"] if isinstance(each, dict)]
    rank = _rank(path, trace, events, run)
    if rank is None:
        raise DoctorError(
            f"{path} belongs to no rank of the run",
            "put the rank into its name, as in rank0.json",
        )
    return Profile(rank, integer(trace, "baseTimeNanoseconds"), events)


def _rank(path: Path, trace: JsonObject, events: list[JsonObject], run: Run) -> int | None:
    ranks = {rank.rank for rank in run.last}
    recorded = trace.get("distributedInfo")
    if isinstance(recorded, dict) and integer(recorded, "rank", -1) in ranks:
        return integer(recorded, "rank")
    pids = {rank.status.pid: rank.rank for rank in run.last if rank.status is not None}
    for event in events[:1000]:
        if isinstance(event.get("pid"), int) and event["pid"] in pids:
            return pids[event["pid"]]
    named = _RANK.search(path.name)
    return int(named[1]) if named is not None and int(named[1]) in ranks else None


def merged(
    profiles: Sequence[Profile], zero: int, behind: Callable[[int], int]
) -> Iterator[JsonObject]:
    """The events of all traces, on the clock of the run's trace.

    Args:
        profiles: The traces.
        zero: Unix nanoseconds at which the run's trace begins.
        behind: Nanoseconds to take off the moments of a rank.
    """
    every = {profile.rank: _Numbers(profile.rank) for profile in profiles}
    for profile in profiles:
        shift = (profile.base - zero - behind(profile.rank)) / 1e3
        numbers = every[profile.rank]
        numbers.begin()
        for event in profile.events:
            moved = numbers.of(event)
            if isinstance(event.get("ts"), (int, float)):
                moved["ts"] = round(event["ts"] + shift, 3)
            yield from numbers.named()
            yield moved


class _Numbers:
    """Numbers for the processes, tracks and arrows of a rank, which no other rank has."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[int, str], int] = {}
        self._arrows: dict[str, int] = {}
        self._next_arrow = (rank + 1) * _ARROWS
        self._names: list[JsonObject] = []

    def begin(self) -> None:
        """Another trace of the rank begins, as its profiler writes one a cycle."""
        self._next_arrow += len(self._arrows)
        self._arrows.clear()

    def of(self, event: JsonObject) -> JsonObject:
        """An event of that trace with these numbers."""
        moved: dict[str, Any] = _shown(event)
        moved["pid"] = process = self._process(event.get("pid"))
        moved["tid"] = self._track(process, event.get("tid"))
        if "id" in event:
            # Perfetto reads a word as a hexadecimal number, and draws no arrow for other words.
            number = self._next_arrow + len(self._arrows)
            moved["id"] = self._arrows.setdefault(str(event["id"]), number)
        if event.get("ph") == "M" and event.get("name") == "process_name":
            named = event.get("args")
            name = named.get("name", "") if isinstance(named, dict) else ""
            moved["args"] = {"name": self._name(f"{name} {event.get('pid')}")}
        return moved

    def named(self) -> Iterator[JsonObject]:
        """The names of what has a word in place of a number, once."""
        yield from self._names
        self._names.clear()

    def _name(self, what: str) -> str:
        return shown(f"rank {self._rank} profiler: {what.strip()}".rstrip(": "))

    def _process(self, pid: object) -> int:
        """A process of the host, a GPU, or a word for what is none of both."""
        number = self._processes.get(str(pid))
        if number is None:
            number = self._processes[str(pid)] = (self._rank + 1) * _PLACE + len(self._processes)
            if not isinstance(pid, int):
                name = self._name(str(pid or ""))
                self._names.append(
                    {"ph": "M", "name": "process_name", "pid": number, "tid": 0,
                     "args": {"name": name}}
                )  # fmt: skip
        return number

    def _track(self, process: int, tid: object) -> int:
        if isinstance(tid, int):
            return tid
        number = self._tracks.get((process, str(tid)))
        if number is None:
            number = self._tracks[process, str(tid)] = zlib.crc32(str(tid).encode())
            if tid:
                self._names.append(
                    {"ph": "M", "name": "thread_name", "pid": process, "tid": number,
                     "args": {"name": shown(str(tid))}}
                )  # fmt: skip
        return number


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value, "\n")
    if isinstance(value, dict):
        return {shown(str(key)): _shown(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return None if isinstance(value, float) and value - value != 0 else value
