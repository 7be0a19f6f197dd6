"""Files that torch's Flight Recorder wrote of a job that ran without ddpdoctor, as a hang's record.

torch writes one file per rank when a collective of NCCL times out (``TORCH_FR_DUMP_TEMP_FILE``; in
older versions ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``), or on request: a pickle, or JSON. The format is
that of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``, read from version 2.0 (torch 2.4) on.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ddpdoctor.analysis.calls import Call, first_pending, from_flight
from ddpdoctor.analysis.flight_files import HINT, chosen, loaded
from ddpdoctor.analysis.hang_snapshot import QUEUED
from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import integer
from ddpdoctor.core.ranks import spans
from ddpdoctor.run.names import MOST_WORLD
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.supervisor import HangRecord
from ddpdoctor.run.snapshot import Records, Run
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks.user_frames import is_user_path

PATIENCE = 120_000_000_000
"""Nanoseconds after which a pending collective counts as a hang, unless its timeout is shorter.

On a busy machine torch took half a minute to write a file."""

_LASTING = ("DDP802", "DDP814")
"""Findings that need a wait to last; the others follow from what the ranks called."""

_WRITING = 60_000_000_000
"""Nanoseconds that torch gives the ranks to write, after the timeout."""

_TOGETHER = 3600 * 1_000_000_000
"""Nanoseconds by which the files of one job differ at most; older files are of an earlier job."""

_KEPT = 8192
"""Collectives around the one that a rank waits for, of a group and of all ranks together."""

_LEAST = 8
_MOST_ENTRIES = 20_000
"""Collectives of a file, the newest ones."""

_MOST_GROUPS = 256
"""Groups of a rank."""

_MOST_FRAMES = 256
_MOST_TEXT = 4096
"""Letters of a name or a path."""

_MOST_LINES = 8
"""Lines that led to a collective."""

_TORCH = re.compile(r"/torch/(?:distributed|nn|autograd|optim|utils|_\w+)[/.]")


@dataclass(frozen=True)
class Dumps:
    """The files of a job.

    Attributes:
        run: A run without a directory, whose ranks were examined in a hang.
        ranks: The ranks whose files were read.
        missing: Other ranks of the job.
        trouble: What was not read and why, a line each.
        remark: Why the files do not prove a hang; empty if they do.
    """

    run: Run
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    trouble: tuple[str, ...]
    remark: str

    def proves(self, code: str) -> bool:
        """Whether a finding of a hang holds for these files."""
        return not self.remark or code not in _LASTING


@dataclass(frozen=True)
class _Dump:
    name: str
    groups: Mapping[str, frozenset[int]]
    """The members of its groups, by name."""
    entries: Sequence[JsonObject]
    """What is kept of the collectives, in the words of a rank's own answer."""
    forgets: bool
    """It has had collectives that are not in the file."""
    timeout: int
    """Nanoseconds after which the collective that it waits for times out."""
    moment: int
    """When it was written, by the clock of the rank, in Unix nanoseconds."""


def read(names: Sequence[str]) -> Dumps:
    """Read the files of a job.

    Args:
        names: Directories with such files, or the files.

    Raises:
        DoctorError: There are none.
    """
    found, trouble = chosen(names)
    kept = max(_LEAST, _KEPT // max(1, len(found)))
    times = {rank: _written(path) for rank, (path, _) in found.items()}
    newest = max(times.values(), default=0)
    dumps: dict[int, _Dump] = {}
    for rank, (path, links) in sorted(found.items()):
        written = times[rank]
        if written and newest - written > _TOGETHER:
            hours = (newest - written) / 3.6e12
            trouble.append(f"{path} was not read: it is {hours:.0f} h older than the newest file")
            continue
        try:
            dumps[rank] = _dump(os.path.basename(path), loaded(path, links), written, kept)
        except (OSError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) else str(error)
            trouble.append(f"{path} was not read: {words}")
    if not dumps:
        raise DoctorError(
            trouble[0] if trouble else f"no Flight Recorder dump in {' '.join(names)}", HINT
        )
    # gloo does not record the members of its groups: every rank that a file names counts.
    known = set(dumps).union(*(ranks for each in dumps.values() for ranks in each.groups.values()))
    world = range(max(known) + 1)
    record = _examination(dumps, world)
    supervisor = Records((record,))
    return Dumps(
        Run(path=Path(names[0]), manifest={}, ranks=(), supervisor=supervisor, taken=record.time),
        ranks=tuple(dumps),
        missing=tuple(sorted(set(world) - set(dumps))),
        trouble=tuple(trouble),
        remark=_remark(record),
    )


def _written(path: str) -> int:
    """When a file was written, in Unix nanoseconds; 0 if it is gone."""
    try:
        return opening.facts(path).st_mtime_ns
    except OSError:
        return 0


# -- one file


def _dump(name: str, found: JsonObject, written: int, kept: int) -> _Dump:
    recorded = found.get("entries")
    entries = _list(recorded[-_MOST_ENTRIES:] if type(recorded) is list else [], dict)
    groups = {
        str(group)[:_MOST_TEXT]: _members(config["ranks"])
        for group, config in islice(_dict(found.get("pg_config")).items(), _MOST_GROUPS)
        if isinstance(config, dict) and isinstance(config.get("ranks"), str)
    }
    first = min((integer(each, "record_id") for each in entries), default=0)
    calls = _Calls(groups)
    reported = [calls.reported(order, each) for order, each in enumerate(entries)]
    kept_calls = _window(_whole(reported), kept)
    pending = _pending(kept_calls)
    timeout = 0
    if pending is not None:
        # A copy may have a later time; torch writes the file when the collective times out.
        timeout = integer(entries[pending.order], "timeout_ms") * 1_000_000
        written = min(written, pending.began + (timeout or PATIENCE) + _WRITING)
    return _Dump(
        name=name,
        groups=groups,
        entries=kept_calls,
        forgets=first > 0 or (not entries and bool(_dict(found.get("pg_status")))),
        timeout=timeout,
        moment=max([written, *(each["created"] for each in kept_calls)]),
    )


def _pending(calls: Sequence[JsonObject]) -> Call | None:
    """The first collective that is not done."""
    return first_pending([from_flight(each) for each in calls])


class _Calls:
    """Writes down collectives of a dump as a rank of ours does (`RankState.flight`)."""

    def __init__(self, groups: Mapping[str, frozenset[int]]) -> None:
        self._groups = {
            # Groups that were split off may share a name.
            name: (f"{name}|{spans(ranks)}", spans(ranks)) if ranks else (name, "")
            for name, ranks in groups.items()
        }
        self._users: dict[tuple[str, int], str] = {}
        """Lines of the user's by file and number; empty for those of others."""

    def reported(self, order: int, entry: JsonObject) -> JsonObject:
        """One collective, or an exchange between two ranks."""
        backend, _, name = _text(entry, "profiling_name").rpartition(":")
        group, members = self._group(entry)
        return {
            "id": order,
            "group": group,
            "members": members,
            "sequence": integer(entry, "collective_seq_id"),
            "point_to_point": entry.get("is_p2p") is True,
            "backend": backend,
            "name": name,
            "shapes": [_shape(each) for each in _list(entry.get("input_sizes"), list, 4)],
            "dtypes": [each[:40] for each in _list(entry.get("input_dtypes"), str, 4)],
            "created": integer(entry, "time_created_ns"),
            # NCCL's watchdog also lets go of what has timed out; gloo knows no state.
            "retired": entry.get("retired") is True and backend == "gloo",
            "state": _text(entry, "state"),
            "lines": self._lines(_list(entry.get("frames"), dict, _MOST_FRAMES)),
        }

    def _group(self, entry: JsonObject) -> tuple[str, str]:
        """The name and the members of the group; those of the default group are set later."""
        recorded = entry.get("process_group")
        words = recorded if isinstance(recorded, (tuple, list)) else [recorded]
        known = [each[:_MOST_TEXT] for each in words[:2] if isinstance(each, str)]
        name, description = [*known, "", ""][:2]
        if description == "default_pg" or name == "0":
            return "0", ""
        return self._groups.get(name, (name, ""))

    def _lines(self, frames: Sequence[JsonObject]) -> list[str]:
        found = []
        for frame in frames:
            path, line = _text(frame, "filename"), integer(frame, "line", -1)
            if (path, line) not in self._users:
                is_user = line >= 0 and is_user_path(path) and not _TORCH.search(path)
                self._users[path, line] = f"{path}:{line}" if is_user else ""
            if self._users[path, line]:
                found.append(self._users[path, line])
        return found[:_MOST_LINES]


def _whole(calls: Sequence[JsonObject]) -> list[JsonObject]:
    """Without the parts of coalesced collectives, which torch never marks as completed."""
    coalesced = {(each["group"], each["sequence"]) for each in calls if each["name"] == "coalesced"}
    return [
        each
        for each in calls
        if each["name"] == "coalesced" or (each["group"], each["sequence"]) not in coalesced
    ]


def _window(calls: Sequence[JsonObject], kept: int) -> list[JsonObject]:
    """The collectives of each group around the first one that is not done, and the newest one."""
    groups: dict[tuple[str, str], list[JsonObject]] = defaultdict(list)
    for each in calls:
        if not each["point_to_point"]:
            groups[each["group"], each["backend"]].append(each)
    found: list[JsonObject] = []
    for own in list(groups.values())[-_MOST_GROUPS:]:
        pending = _pending(own)
        ids = [each["id"] for each in own]
        at = len(own) - 1 if pending is None else ids.index(pending.order)
        near = own[max(0, at - kept) : at + kept]
        found += near if near[-1] is own[-1] else [*near, own[-1]]
    return sorted(found, key=lambda each: int(each["id"]))


# -- all files


def _examination(dumps: Mapping[int, _Dump], world: Iterable[int]) -> HangRecord:
    """The files, as an examination of a job that makes no progress would have seen its ranks."""
    taken = max(each.moment for each in dumps.values())
    members: dict[str, str] = {}
    for dump in dumps.values():
        members |= {each["group"]: each["members"] for each in dump.entries}
    members["0"] = spans(world)
    ranks = tuple(_rank(rank, dump, taken, members) for rank, dump in sorted(dumps.items()))
    last = max(each["since"] for each in ranks)
    seconds = round((taken - last) / 1e9, 1)
    return HangRecord(time=taken, number=1, restart=0, seconds=seconds, ranks=ranks)


def _remark(record: HangRecord) -> str:
    """Why the ranks of these files are not said to hang; empty if they do."""
    waits = [each for each in record.ranks if each["phase"]]
    if not waits:
        return "no rank waits in a collective"
    first = min(waits, key=lambda each: int(each["since"]))
    lasted = record.time - integer(first, "since")
    enough = min(PATIENCE, integer(first, "timeout") or PATIENCE)
    if lasted >= enough:
        return ""
    return (
        f"rank {first['rank']} had waited in a collective for {lasted / 1e9:.0f} s when its file "
        f"was written: a hang is one of {enough / 1e9:.0f} s and more"
    )


def _rank(rank: int, dump: _Dump, taken: int, members: Mapping[str, str]) -> JsonObject:
    """What a file says of its rank, with all times by one clock: files are written at one time."""
    shift = taken - dump.moment
    calls = [
        {**each, "members": members[each["group"]], "created": each["created"] + shift}
        for each in dump.entries
    ]
    pending = _pending(calls)
    waits = pending is not None and taken - pending.began >= QUEUED
    phase = ""
    if pending is not None and waits:
        # A thread of C++ has no Python frames: there DDP reduces what backward has computed.
        native = pending.site is None and any(each["lines"] for each in calls)
        phase = (Phase.BACKWARD if native else Phase.WAIT).label
    last = calls[-1]["created"] if calls else taken
    return {
        "rank": rank,
        "restart": 0,
        "dump": dump.name,
        "timeout": dump.timeout,
        "phase": phase,
        "since": pending.began if pending is not None else last,
        "site": str(pending.site or "") if pending is not None else "",
        "flight": calls,
        "forgets": dump.forgets,
    }


# -- values that may be anything


def _text(found: JsonObject, key: str) -> str:
    value = found.get(key)
    return value[:_MOST_TEXT] if isinstance(value, str) else ""


def _dict(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _list(value: Any, kind: type[Any], most: int | None = None) -> list[Any]:
    """What is of a type among the first ones: many entries may share one long list."""
    return [each for each in value[:most] if isinstance(each, kind)] if type(value) is list else []


def _shape(sizes: list[Any]) -> list[int]:
    return [each for each in sizes[:16] if isinstance(each, int) and 0 <= each < 1 << 48]


@lru_cache(maxsize=_MOST_GROUPS)
def _members(recorded: str) -> frozenset[int]:
    """The ranks of a group, which torch writes as ``"[0, 1]"``."""
    found = (int(each) for each in re.findall(r"\d{1,6}", recorded))
    return frozenset(each for each in found if each < MOST_WORLD)
