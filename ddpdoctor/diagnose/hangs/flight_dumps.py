"""Convert torch's Flight Recorder dumps to the record of a hang."""

from __future__ import annotations

import os
import pickletools
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import spans
from ddpdoctor.core.opening import integer
from ddpdoctor.diagnose.collectives.recorded_calls import Call, first_pending, from_flight
from ddpdoctor.diagnose.hangs.hang_snapshot import MIN_PENDING_NS
from ddpdoctor.run.names import MAX_WORLD_SIZE
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.supervisor import FlightCall, HangRecord, RankEvidence
from ddpdoctor.run.snapshot import Records, Run
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks.frames import is_user_path

# -- pickles of plain data

MAX_MEMORY = 96 << 20  # Approximate maximum size of a file's objects, in bytes

_CONTAINER = 120
"""Bytes of a container or a string on a 64-bit machine, including its slot in another one."""

_SLOT = 8  # Bytes of a slot on the stack

_NUMBER = 40  # Bytes of a number

_VALUES = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
)
"""Opcodes whose argument is the value to push."""

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_TUPLES = {"TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class DamagedPickleError(ValueError):
    """A pickle holds more than plain data, is truncated, or takes too much memory."""


def loads(data: bytes) -> Any:
    """Read a pickle of plain data, without running or importing code.

    Containers in the result may be shared or contain themselves. Callers must limit the depth.

    Raises:
        DamagedPickleError: If it has other objects, is damaged, or exceeds `MAX_MEMORY`.
    """
    try:
        return _Machine().run(data)
    except DamagedPickleError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, struct.error):
        raise DamagedPickleError("is damaged or cut short") from None


class _Machine:
    """A stack machine that runs a pickle, for the opcodes of plain data."""

    def __init__(self) -> None:
        self._left = MAX_MEMORY
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # The stacks under each mark
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Execute the opcodes to the end."""
        value: Any
        for opcode, value, _ in pickletools.genops(data):
            name = opcode.name
            if name in ("BINGET", "LONG_BINGET"):
                # First, because these are half of the opcodes of a real file.
                self._push(self._memo[value])
            elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                self._count(_CONTAINER)
                self._memo[len(self._memo) if value is None else value] = self._stack[-1]
            elif name in _VALUES:
                self._value(value)
            elif name in _CONSTANTS:
                self._push(_CONSTANTS[name])
            elif name in _EMPTY:
                self._push(_EMPTY[name](), _CONTAINER)
            elif name == "MARK":
                self._count(_CONTAINER)
                self._below.append(self._stack)
                self._stack = []
            elif name in _TUPLES:
                items = self._items(_TUPLES[name])
                self._push(tuple(items), _CONTAINER + _SLOT * len(items))
            elif name in ("APPEND", "APPENDS"):
                items = self._items(1 if name == "APPEND" else None)
                self._container(list).extend(items)
            elif name in ("SETITEM", "SETITEMS"):
                self._set(self._items(2 if name == "SETITEM" else None))
            elif name == "STOP":
                break
            elif name not in ("PROTO", "FRAME"):
                raise DamagedPickleError(
                    f"holds more than plain data (opcode {ord(opcode.code):#04x})"
                )
        return self._stack.pop()

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise DamagedPickleError(f"takes more than {MAX_MEMORY >> 20} MB")

    def _push(self, value: Any, size: int = _SLOT) -> None:
        self._count(size)
        self._stack.append(value)

    def _value(self, value: Any) -> None:
        if isinstance(value, int) and not -1 << 63 <= value < 1 << 63:
            raise DamagedPickleError("has an integer of more than 64 bits")
        self._push(value, _CONTAINER + 4 * len(value) if isinstance(value, str) else _NUMBER)

    def _items(self, count: int | None) -> list[Any]:
        """Pop ``count`` items, or those since the newest mark."""
        if count is None:
            found, self._stack = self._stack, self._below.pop()
            return found
        return [self._stack.pop() for _ in range(count)][::-1]

    def _container(self, kind: type[Any]) -> Any:
        if type(self._stack[-1]) is not kind:
            raise DamagedPickleError("is damaged")
        return self._stack[-1]

    def _set(self, items: list[Any]) -> None:
        keys = items[::2]
        # Hashing a key of nested tuples could recurse to any depth.
        if not all(type(each) in (str, int) for each in keys):
            raise DamagedPickleError("is damaged")
        self._count(_CONTAINER * len(keys))
        self._container(dict).update(zip(keys, items[1::2], strict=False))


# -- the files, which are not trusted

MAX_FILE_SIZE = 16 << 20  # Maximum size of a file in bytes: 100,000 collectives

MAX_FILES = 1024  # Maximum number of files

_RANK = re.compile(r"(\d{1,6})(\.(?:json|pickle|pkl|bin))?$")
FILES_HINT = (
    "set TORCH_FR_DUMP_TEMP_FILE (older torch: TORCH_NCCL_DEBUG_INFO_TEMP_FILE) to a path and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1, and name the directory"
)


def chosen_files(names: Sequence[str]) -> tuple[dict[int, tuple[str, bool]], list[str]]:
    """Return each rank's file, whether it may be a link, and lines about skipped files.

    A directory may hold dumps of several names. Read those of the name with most ranks.

    Raises:
        DoctorError: If there is no such file or directory.
    """
    by_name: dict[tuple[bool, str], dict[int, tuple[str, bool]]] = defaultdict(dict)
    for name in names:
        folder = Path(name)
        if not folder.exists():
            raise DoctorError(f"no such file or directory: {name}", FILES_HINT)
        inside = folder.is_dir()
        paths = [str(folder / each) for each in opening.names(folder)] if inside else [name]
        for path in paths:
            base = os.path.basename(path)
            number = _RANK.search(base)
            begin = _first_byte(path, links=not inside) if number is not None else b""
            if number is not None and begin in (b"\x80", b"{"):
                pattern = f"{base[: number.start()]}*{number[2] or ''}"
                by_name[begin == b"{", pattern][int(number[1])] = (path, not inside)
    if not by_name:
        return {}, []
    # Prefer pickles to JSON, because only they contain the lines of code.
    order = sorted(by_name, key=lambda each: (-len(by_name[each]), each))
    chosen = by_name[order[0]]
    trouble = [f"files {name} were not read: name them" for _, name in order[1:3]]
    if len(chosen) > MAX_FILES:
        trouble.append(f"{len(chosen) - MAX_FILES} files were not read: the limit is {MAX_FILES}")
    return {rank: chosen[rank] for rank in sorted(chosen)[:MAX_FILES]}, trouble


def _first_byte(path: str, links: bool) -> bytes:
    """Return the first byte of a file, or nothing if it cannot be read."""
    try:
        with opening.file(path, links=links) as file:
            return file.read(1)
    except OSError:
        return b""


def load_file(path: str, links: bool) -> JsonObject:
    """Load a dump, which is a pickle or JSON.

    Raises:
        OSError: If it cannot be opened, or is too large.
        ValueError: If it is neither, or takes too much memory.
    """
    data = opening.contents(path, MAX_FILE_SIZE, links=links)
    if data[:1] == b"\x80":
        found = loads(data)
    elif opening.expanded(data) > MAX_MEMORY:
        raise ValueError(f"takes more than {MAX_MEMORY >> 20} MB")
    else:
        found = opening.loads(data)
    if not isinstance(found, dict) or "version" not in found:
        raise ValueError("is no Flight Recorder dump")
    return found


# -- the dumps of a job

MIN_HANG_NS = 120_000_000_000
"""Nanoseconds after which a pending collective counts as a hang, unless its timeout is shorter.

Writing a file took torch half a minute on a busy machine."""

_NEED_A_HANG = ("DDP802", "DDP814")
"""Findings that require a long wait. The others follow from the ranks' calls."""

_WRITE_TIMEOUT_NS = 60_000_000_000
"""Nanoseconds after the timeout for which torch lets the ranks write."""

_MAX_AGE_NS = 3600 * 1_000_000_000
"""Maximum nanoseconds between the files of one job. Older files belong to an earlier job."""

_MAX_KEPT = 8192
"""Number of collectives to keep around the awaited one, of a group on all ranks together."""

_MIN_KEPT = 8  # Minimum number of them for one rank

_MAX_ENTRIES = 20_000  # Maximum number of collectives to read from a file, newest first

_MAX_GROUPS = 256  # Maximum number of groups of a rank

_MAX_FRAMES = 256
_MAX_TEXT = 4096  # Maximum length of a name or a path

_MAX_LINES = 8  # Maximum number of lines to keep that led to a collective

_TORCH = re.compile(r"/torch/(?:distributed|nn|autograd|optim|utils|_\w+)[/.]")


@dataclass(frozen=True)
class Dumps:
    """The files of a job."""

    run: Run  # A run without a directory, with the files as the examination of a hang
    ranks: tuple[int, ...]  # The ranks whose files were read
    missing: tuple[int, ...]  # Other ranks of the job
    trouble: tuple[str, ...]  # One line for each unread file, with the reason
    remark: str  # The reason why the files do not prove a hang. Empty if they do.

    def proves(self, code: str) -> bool:
        """Return whether these files prove a finding of a code."""
        return not self.remark or code not in _NEED_A_HANG


@dataclass(frozen=True)
class _Dump:
    name: str
    groups: Mapping[str, frozenset[int]]  # The members of its groups, by name
    entries: Sequence[FlightCall]  # The kept collectives
    forgets: bool  # Whether the file lacks older collectives
    timeout: int  # The timeout of the awaited collective, in nanoseconds
    written: int  # Time of writing according to the rank's clock, in Unix nanoseconds


def read(names: Sequence[str]) -> Dumps:
    """Read the files of a job, given by their names or their directories.

    Raises:
        DoctorError: If there are none.
    """
    found, trouble = chosen_files(names)
    kept = max(_MIN_KEPT, _MAX_KEPT // max(1, len(found)))
    times = {rank: _written(path) for rank, (path, _) in found.items()}
    newest = max(times.values(), default=0)
    dumps: dict[int, _Dump] = {}
    for rank, (path, links) in sorted(found.items()):
        written = times[rank]
        if written and newest - written > _MAX_AGE_NS:
            hours = (newest - written) / 3.6e12
            trouble.append(f"{path} was not read: it is {hours:.0f} h older than the newest file")
            continue
        try:
            dumps[rank] = _dump(os.path.basename(path), load_file(path, links), written, kept)
        except (OSError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) else str(error)
            trouble.append(f"{path} was not read: {words}")
    if not dumps:
        raise DoctorError(
            trouble[0] if trouble else f"no Flight Recorder dump in {' '.join(names)}", FILES_HINT
        )
    # gloo does not record the members of its groups. Use all ranks that have files.
    known = set(dumps).union(*(ranks for each in dumps.values() for ranks in each.groups.values()))
    world = range(max(known) + 1)
    taken = max(each.written for each in dumps.values())
    members: dict[str, str] = {}
    for dump in dumps.values():
        members |= {each.group: each.members for each in dump.entries}
    members["0"] = spans(world)
    ranks = tuple(_rank(rank, dump, taken, members) for rank, dump in sorted(dumps.items()))
    last = max(each.since for each in ranks)
    seconds = round((taken - last) / 1e9, 1)
    record = HangRecord(time=taken, number=1, restart=0, seconds=seconds, ranks=ranks)
    supervisor = Records((record,))
    return Dumps(
        Run(path=Path(names[0]), manifest={}, ranks=(), supervisor=supervisor, taken=record.time),
        ranks=tuple(dumps),
        missing=tuple(sorted(set(world) - set(dumps))),
        trouble=tuple(trouble),
        remark=_remark(record),
    )


def _written(path: str) -> int:
    """Return a file's time of writing in Unix nanoseconds. 0 if the file is gone."""
    try:
        return opening.facts(path).st_mtime_ns
    except OSError:
        return 0


# -- one file


def _dump(name: str, found: JsonObject, written: int, kept: int) -> _Dump:
    recorded = found.get("entries")
    entries = _list(recorded[-_MAX_ENTRIES:] if type(recorded) is list else [], dict)
    groups = {
        str(group)[:_MAX_TEXT]: _members(config["ranks"])
        for group, config in islice(_dict(found.get("pg_config")).items(), _MAX_GROUPS)
        if isinstance(config, dict) and isinstance(config.get("ranks"), str)
    }
    first = min((integer(each, "record_id") for each in entries), default=0)
    calls = _Calls(groups)
    reported = [calls.reported(order, each) for order, each in enumerate(entries)]
    kept_calls = _window(_whole(reported), kept)
    pending = _pending(kept_calls)
    timeout = 0
    if pending is not None:
        # A copied file may have a later time than the original, which torch wrote at the timeout.
        timeout = integer(entries[pending.order], "timeout_ms") * 1_000_000
        latest = pending.began + (timeout or MIN_HANG_NS) + _WRITE_TIMEOUT_NS
        written = min(written, latest)
    return _Dump(
        name=name,
        groups=groups,
        entries=kept_calls,
        forgets=first > 0 or (not entries and bool(_dict(found.get("pg_status")))),
        timeout=timeout,
        written=max([written, *(each.created for each in kept_calls)]),
    )


def _pending(calls: Sequence[FlightCall]) -> Call | None:
    return first_pending([from_flight(each) for each in calls])


class _Calls:
    """Converts the entries of a dump."""

    def __init__(self, groups: Mapping[str, frozenset[int]]) -> None:
        self._groups = {
            # Split groups may share a name. Add their ranks.
            name: (f"{name}|{spans(ranks)}", spans(ranks)) if ranks else (name, "")
            for name, ranks in groups.items()
        }
        self._users: dict[tuple[str, int], str] = {}
        """The user's lines by file and number. Empty for other lines."""

    def reported(self, order: int, entry: JsonObject) -> FlightCall:
        """Convert one collective, or an exchange between two ranks."""
        backend, _, name = _text(entry, "profiling_name").rpartition(":")
        group, members = self._group(entry)
        shapes = _list(entry.get("input_sizes"), list, 4)
        return FlightCall(
            id=order,
            group=group,
            members=members,
            sequence=integer(entry, "collective_seq_id"),
            point_to_point=entry.get("is_p2p") is True,
            backend=backend,
            name=name,
            shapes=tuple(
                tuple(size for size in each[:16] if isinstance(size, int) and 0 <= size < 1 << 48)
                for each in shapes
            ),
            dtypes=tuple(each[:40] for each in _list(entry.get("input_dtypes"), str, 4)),
            created=integer(entry, "time_created_ns"),
            # NCCL's watchdog also retires collectives that timed out. gloo has no state.
            retired=entry.get("retired") is True and backend == "gloo",
            state=_text(entry, "state"),
            lines=self._lines(_list(entry.get("frames"), dict, _MAX_FRAMES)),
        )

    def _group(self, entry: JsonObject) -> tuple[str, str]:
        """Return the name and members of the group. The default group gets its members later."""
        recorded = entry.get("process_group")
        words = recorded if isinstance(recorded, (tuple, list)) else [recorded]
        known = [each[:_MAX_TEXT] for each in words[:2] if isinstance(each, str)]
        name, description = [*known, "", ""][:2]
        if description == "default_pg" or name == "0":
            return "0", ""
        return self._groups.get(name, (name, ""))

    def _lines(self, frames: Sequence[JsonObject]) -> tuple[str, ...]:
        found = []
        for frame in frames:
            path, line = _text(frame, "filename"), integer(frame, "line", -1)
            if (path, line) not in self._users:
                is_user = line >= 0 and is_user_path(path) and not _TORCH.search(path)
                self._users[path, line] = f"{path}:{line}" if is_user else ""
            if self._users[path, line]:
                found.append(self._users[path, line])
        return tuple(found[:_MAX_LINES])


def _whole(calls: Sequence[FlightCall]) -> list[FlightCall]:
    """Drop the parts of coalesced collectives, which torch never marks as completed."""
    coalesced = {(each.group, each.sequence) for each in calls if each.name == "coalesced"}
    return [
        each
        for each in calls
        if each.name == "coalesced" or (each.group, each.sequence) not in coalesced
    ]


def _window(calls: Sequence[FlightCall], kept: int) -> list[FlightCall]:
    """Keep the collectives of each group around the first one not done, and the newest one."""
    groups: dict[tuple[str, str], list[FlightCall]] = defaultdict(list)
    for each in calls:
        if not each.point_to_point:
            groups[each.group, each.backend].append(each)
    found: list[FlightCall] = []
    for own in list(groups.values())[-_MAX_GROUPS:]:
        pending = _pending(own)
        ids = [each.id for each in own]
        at = len(own) - 1 if pending is None else ids.index(pending.order)
        near = own[max(0, at - kept) : at + kept]
        found += near if near[-1] is own[-1] else [*near, own[-1]]
    return sorted(found, key=lambda each: each.id)


# -- all files


def _remark(record: HangRecord) -> str:
    """Return the reason why the ranks of these files do not hang. Empty if they do."""
    waits = [each for each in record.ranks if each.phase]
    if not waits:
        return "no rank waits in a collective"
    first = min(waits, key=lambda each: each.since)
    lasted = record.time - first.since
    enough = min(MIN_HANG_NS, first.timeout or MIN_HANG_NS)
    if lasted >= enough:
        return ""
    return (
        f"rank {first.rank} had waited in a collective for {lasted / 1e9:.0f} s when its file "
        f"was written: a hang is one of {enough / 1e9:.0f} s and more"
    )


def _rank(rank: int, dump: _Dump, taken: int, members: Mapping[str, str]) -> RankEvidence:
    """Convert a rank's file to evidence, in the time ``taken`` at which all ranks wrote."""
    shift = taken - dump.written
    calls = tuple(
        replace(each, members=members[each.group], created=each.created + shift)
        for each in dump.entries
    )
    pending = _pending(calls)
    phase, site, since = "", None, calls[-1].created if calls else taken
    if pending is not None:
        site, since = pending.site, pending.began
        if taken - pending.began >= MIN_PENDING_NS:
            # DDP reduces gradients in a C++ thread, which has no Python frames.
            native = pending.site is None and any(each.lines for each in calls)
            phase = (Phase.BACKWARD if native else Phase.WAIT).label
    return RankEvidence(
        rank=rank,
        dump=dump.name,
        timeout=dump.timeout,
        phase=phase,
        since=since,
        site=str(site or ""),
        flight=calls,
        forgets=dump.forgets,
    )


# -- untrusted values


def _text(found: JsonObject, key: str) -> str:
    value = found.get(key)
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _dict(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _list(value: Any, kind: type[Any], most: int | None = None) -> list[Any]:
    """Return the first elements of one type, because many entries may share one long list."""
    return [each for each in value[:most] if isinstance(each, kind)] if type(value) is list else []


@lru_cache(maxsize=_MAX_GROUPS)
def _members(recorded: str) -> frozenset[int]:
    """Parse the ranks of a group, which torch writes as ``"[0, 1]"``."""
    found = (int(each) for each in re.findall(r"\d{1,6}", recorded))
    return frozenset(each for each in found if each < MAX_WORLD_SIZE)
