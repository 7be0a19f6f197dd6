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
    for profile in profiles:
        shift = (profile.base - zero - behind(profile.rank)) / 1e3
        processes: dict[str, int] = {}
        for event in profile.events:
            yield _moved(event, profile.rank, shift, processes)


def _moved(event: JsonObject, rank: int, shift: float, processes: dict[str, int]) -> JsonObject:
    """An event with numbers that no other trace has."""
    moved: dict[str, Any] = _shown(event)
    # A process of the host, a GPU, or a word for what is none of both.
    key = str(event.get("pid"))
    moved["pid"] = processes.setdefault(key, (rank + 1) * _PLACE + len(processes))
    if not isinstance(moved.get("tid"), int):
        moved["tid"] = zlib.crc32(str(moved.get("tid")).encode())
    if isinstance(event.get("ts"), (int, float)):
        moved["ts"] = round(event["ts"] + shift, 3)
    if "id" in event:
        moved["id"] = f"{rank}.{event['id']}"
    if event.get("ph") == "M" and event.get("name") == "process_name":
        named = event.get("args")
        name = named.get("name", "") if isinstance(named, dict) else ""
        moved["args"] = {"name": shown(f"rank {rank} profiler: {name} {key}".strip())}
    return moved


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value, "\n")
    if isinstance(value, dict):
        return {shown(str(key)): _shown(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return None if isinstance(value, float) and value - value != 0 else value
