"""Read dump files of torch's Flight Recorder as the record of a hang."""

from __future__ import annotations

import os
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import spans
from ddpdoctor.core.opening import integer
from ddpdoctor.diagnose.collectives.recorded_calls import Call, first_pending, from_flight
from ddpdoctor.diagnose.hangs.hang_snapshot import QUEUED
from ddpdoctor.run.names import MOST_WORLD
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.supervisor import HangRecord
from ddpdoctor.run.snapshot import Records, Run
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks.frames import is_user_path

# -- plain pickle


MOST_MEMORY = 96 << 20
"""Bytes that the objects of a file may take, about."""

_CONTAINER = 120
"""Bytes that a container or a text takes on a 64-bit machine, its place in another one included."""

_PLACE = 8
"""Bytes that a place on the stack takes."""

_LONGEST = 8
"""Bytes of an integer: what a clock or a counter has."""


class DamagedPickleError(ValueError):
    """The file is no pickle of plain data, is cut short, or takes too much memory."""


def loads(data: bytes) -> Any:
    """Read a pickle; no code of it runs, and nothing is imported.

    Containers of the result may be shared or contain themselves: follow them to a fixed depth.

    Raises:
        DamagedPickleError: It has other objects, is damaged, or takes more than `MOST_MEMORY`.
    """
    try:
        return _Machine(data).run()
    except (IndexError, struct.error, KeyError, TypeError, AttributeError):
        raise DamagedPickleError("is damaged or cut short") from None


class _Machine:
    """The stack machine that a pickle is a program for."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._left = MOST_MEMORY
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        """The stacks under each mark."""
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Follow the opcodes to the end."""
        data, operations = self._data, _OPERATIONS
        while True:
            code = data[self._at]
            self._at += 1
            if code == _BINGET:
                # Half of the opcodes of a real file.
                self._push(self._memo[data[self._at]])
                self._at += 1
                continue
            if code == _STOP:
                return self._stack.pop()
            operation = operations.get(code)
            if operation is None:
                raise DamagedPickleError(f"holds more than plain data (opcode {code:#04x})")
            operation(self)

    def _take(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) < size:
            raise DamagedPickleError("is cut short")
        self._at += size
        return found

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise DamagedPickleError(f"takes more than {MOST_MEMORY >> 20} MB")

    def _push(self, value: Any, size: int = _PLACE) -> None:
        self._count(size)
        self._stack.append(value)

    def _since_mark(self) -> list[Any]:
        found, self._stack = self._stack, self._below.pop()
        return found

    # -- one opcode each

    def skip(self, size: int) -> None:
        """PROTO, FRAME."""
        self._take(size)

    def constant(self, value: Any) -> None:
        """NONE, NEWTRUE, NEWFALSE."""
        self._push(value)

    def integer(self, size: int, signed: bool) -> None:
        """BININT1, BININT2, BININT."""
        self._push(int.from_bytes(self._take(size), "little", signed=signed), 40)

    def long(self) -> None:
        """LONG1."""
        size = self._number(1)
        if size > _LONGEST:
            raise DamagedPickleError("has an integer of more than 64 bits")
        self.integer(size, signed=True)

    def float(self) -> None:
        """BINFLOAT."""
        self._push(struct.unpack(">d", self._take(8))[0], 32)

    def text(self, size: int) -> None:
        """SHORT_BINUNICODE, BINUNICODE, BINUNICODE8."""
        raw = self._take(self._number(size))
        self._push(raw.decode("utf-8", "replace"), _CONTAINER + 4 * len(raw))

    def empty(self, kind: Callable[[], Any]) -> None:
        """EMPTY_LIST, EMPTY_DICT, EMPTY_TUPLE."""
        self._push(kind(), _CONTAINER)

    def mark(self) -> None:
        """MARK."""
        self._count(_CONTAINER)
        self._below.append(self._stack)
        self._stack = []

    def tuple(self, size: int | None) -> None:
        """TUPLE, TUPLE1, TUPLE2, TUPLE3."""
        if size is None:
            items = self._since_mark()
        else:
            items = [self._stack.pop() for _ in range(size)][::-1]
        self._push(tuple(items), _CONTAINER + _PLACE * len(items))

    def append(self) -> None:
        """APPEND."""
        self._fill([self._stack.pop()])

    def appends(self) -> None:
        """APPENDS."""
        self._fill(self._since_mark())

    def _fill(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise DamagedPickleError("is damaged")
        target.extend(items)

    def set_item(self) -> None:
        """SETITEM."""
        value = self._stack.pop()
        self._set([self._stack.pop(), value])

    def set_items(self) -> None:
        """SETITEMS."""
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        # A key that is a tuple of tuples would be hashed to any depth.
        if type(target) is not dict or not all(type(each) in (str, int) for each in items[::2]):
            raise DamagedPickleError("is damaged")
        self._count(_CONTAINER * (len(items) // 2))
        target.update(zip(items[::2], items[1::2], strict=False))

    def remember(self, size: int) -> None:
        """BINPUT, LONG_BINPUT, MEMOIZE."""
        self._count(_CONTAINER)
        self._memo[self._number(size) if size else len(self._memo)] = self._stack[-1]

    def recall(self) -> None:
        """LONG_BINGET."""
        self._push(self._memo[self._number(4)])


_STOP = ord(".")
_BINGET = ord("h")
_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: lambda each: each.skip(1),
    0x95: lambda each: each.skip(8),
    ord("N"): lambda each: each.constant(None),
    0x88: lambda each: each.constant(True),
    0x89: lambda each: each.constant(False),
    ord("K"): lambda each: each.integer(1, signed=False),
    ord("M"): lambda each: each.integer(2, signed=False),
    ord("J"): lambda each: each.integer(4, signed=True),
    0x8A: _Machine.long,
    ord("G"): _Machine.float,
    0x8C: lambda each: each.text(1),
    ord("X"): lambda each: each.text(4),
    0x8D: lambda each: each.text(8),
    ord("]"): lambda each: each.empty(list),
    ord("}"): lambda each: each.empty(dict),
    ord(")"): lambda each: each.empty(tuple),
    ord("("): _Machine.mark,
    ord("t"): lambda each: each.tuple(None),
    0x85: lambda each: each.tuple(1),
    0x86: lambda each: each.tuple(2),
    0x87: lambda each: each.tuple(3),
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    ord("q"): lambda each: each.remember(1),
    ord("r"): lambda each: each.remember(4),
    0x94: lambda each: each.remember(0),
    ord("j"): _Machine.recall,
}


# -- finds and loads the files of torch's Flight Recorder, which may be anybody's


MOST_FILE = 16 << 20
"""Bytes of a file: 100,000 collectives."""

MOST_FILES = 1024
"""Ranks whose files are read."""

_RANK = re.compile(r"(\d{1,6})(\.(?:json|pickle|pkl|bin))?$")
FILES_HINT = (
    "set TORCH_FR_DUMP_TEMP_FILE (older torch: TORCH_NCCL_DEBUG_INFO_TEMP_FILE) to a path and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1, and name the directory"
)


def chosen_files(names: Sequence[str]) -> tuple[dict[int, tuple[str, bool]], list[str]]:
    """The file of each rank, and whether it may be a link; and what is left out, in words.

    A directory may hold dumps of several names: those of the name with most ranks are read.

    Raises:
        DoctorError: There is no such file or directory.
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
    # Of two forms the pickles, which have the lines.
    order = sorted(by_name, key=lambda each: (-len(by_name[each]), each))
    chosen = by_name[order[0]]
    trouble = [f"files {name} were not read: name them" for _, name in order[1:3]]
    if len(chosen) > MOST_FILES:
        trouble.append(f"{len(chosen) - MOST_FILES} files were not read: {MOST_FILES} are at most")
    return {rank: chosen[rank] for rank in sorted(chosen)[:MOST_FILES]}, trouble


def _first_byte(path: str, links: bool) -> bytes:
    """The first byte of a file; none of what cannot be read."""
    try:
        with opening.file(path, links=links) as file:
            return file.read(1)
    except OSError:
        return b""


def load_file(path: str, links: bool) -> JsonObject:
    """A dump, either a pickle or JSON.

    Args:
        path: The file.
        links: It may be a link.

    Raises:
        OSError: It cannot be opened, or is too large.
        ValueError: It is neither, or takes too much memory.
    """
    data = opening.contents(path, MOST_FILE, links=links)
    if data[:1] == b"\x80":
        found = loads(data)
    elif opening.expanded(data) > MOST_MEMORY:
        raise ValueError(f"takes more than {MOST_MEMORY >> 20} MB")
    else:
        found = opening.loads(data)
    if not isinstance(found, dict) or "version" not in found:
        raise ValueError("is no Flight Recorder dump")
    return found


# -- flight dumps


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
    found, trouble = chosen_files(names)
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
            dumps[rank] = _dump(os.path.basename(path), load_file(path, links), written, kept)
        except (OSError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) else str(error)
            trouble.append(f"{path} was not read: {words}")
    if not dumps:
        raise DoctorError(
            trouble[0] if trouble else f"no Flight Recorder dump in {' '.join(names)}", FILES_HINT
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
