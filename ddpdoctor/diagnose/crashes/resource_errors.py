"""Explain exceptions about a file, a path or a port, such as a full disk or an unopened store.

The ranks may have used different paths, or raced for one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.core import opening
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.crashes.rank_endings import NOTHING, Ending, first_failure
from ddpdoctor.diagnose.source_files import brief
from ddpdoctor.failures import recognise
from ddpdoctor.failures.entry import Failure
from ddpdoctor.failures.lines import shortened
from ddpdoctor.run.records.process import ErrorRecord, FileRecord, OwnStoreRecord, ResourceFacts
from ddpdoctor.run.records.training import SaveRecord
from ddpdoctor.run.snapshot import Records, Run

# -- files: a full disk, a limit, several writers

DISK_FULL = "DDP935"
NO_NETWORK = "DDP936"
UNREADABLE = ("DDP944", "DDP945")
"""Codes of unreadable checkpoints. torch's message about a truncated file may match both."""

_MIN_FREE_RATIO = 0.002
"""Minimum free fraction of a file system. Below, it counts as full, because some of it is
reserved for root."""

_MIN_FREE = 1 << 20  # The same in bytes


@dataclass(frozen=True)
class FailureFacts:
    """The known facts about a failure besides its text. Empty if there are none."""

    said: str = ""
    fix: str = ""
    evidence: tuple[str, ...] = ()


def file_facts(cause: Ending, failure: Failure) -> FailureFacts:
    """Return the facts about the file of an exception."""
    path = cause.file.path
    if failure.code == DISK_FULL:
        return _unwritten(cause, path)
    url = shortened(cause.file.url)
    if failure.code == NO_NETWORK and url:
        return FailureFacts(f"has no network for a download from {url}")
    if failure.code in UNREADABLE and path:
        return FailureFacts(evidence=(f"the file is {path}, {_size(cause.file.size)}",))
    return FailureFacts()


def _unwritten(cause: Ending, path: str) -> FailureFacts:
    name = path or "a file"
    free, total = cause.file.free, cause.file.total
    limit, size = cause.file.limit, cause.file.size
    if limit is not None and size >= 0.9 * limit:
        return FailureFacts(
            f"could not write {name}: files may be {_size(limit)} at most (`ulimit -f`)",
            "Raise the limit in the shell or the scheduler's script that starts the job.",
            (f"{path} has {_size(size)}",),
        )
    if free is None or total is None:
        return FailureFacts(f"could not write {path}: no room is left for it" if path else "")
    room = f"{_size(free)} of {_size(total)} are free in {os.path.dirname(path) or '.'}"
    if free <= max(_MIN_FREE, _MIN_FREE_RATIO * total):
        return FailureFacts(f"could not write {name}: the disk is full", evidence=(room,))
    return FailureFacts(
        f"could not write {name}: a quota is reached, or the disk was full at that moment",
        evidence=(f"{room} now",),
    )


def torn(run: Run) -> Ending | None:
    """Return the end of a rank that could not read a checkpoint written by several ranks."""
    cause = first_failure(run, run.restarts[-1])
    if cause is None or cause.file.access != "read":
        return None
    known = recognise(cause.printed, cause.traceback)
    if known is None or known[0].code not in UNREADABLE:
        return None
    path = cause.file.path
    saves = [{record.file for record in rank.records.of(SaveRecord)} for rank in run.last]
    return cause if path and sum(path in files for files in saves) > 1 else None


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


# -- ports: a store that a process cannot open, or that no process opens

PORT_IN_USE = "DDP002"
UNREACHABLE = "DDP912"

_SPAWNED = (
    "torchrun has started every rank already: start the script with python, or call its main "
    "function without mp.spawn."
)
_OWN_RANK = (
    "Only rank 0 opens the port: give each process its own rank "
    '(rank=int(os.environ["RANK"])), or leave rank and init_method out under torchrun.'
)
_NO_ADDRESS = (
    'Leave init_method and MASTER_PORT out, or use init_method="env://": under torchrun no rank '
    "opens a port."
)


def port_facts(run: Run, cause: Ending, failure: Failure) -> FailureFacts:
    """Return the facts about the port of an exception."""
    if failure.code == PORT_IN_USE:
        return _taken(cause.file if cause.file.port is not None else _elsewhere(run))
    store = unopened_store(run.strays, run.restarts[-1])
    if failure.code == UNREACHABLE and store is not None and store.port in cause.text:
        return FailureFacts(
            f"waited for a store at {store_address(store)} that no rank opens", *store_advice(store)
        )
    return FailureFacts()


def unopened_store(strays: Records, restart: int) -> OwnStoreRecord | None:
    """Return a store that torchrun's ranks wait for and that none of them opens."""
    return next((each for each in strays.of(OwnStoreRecord) if each.restart == restart), None)


def store_address(store: OwnStoreRecord) -> str:
    """Return the host and port of the store."""
    return shortened(f"{store.host}:{store.port}")


def store_advice(store: OwnStoreRecord) -> tuple[str, tuple[str, ...]]:
    """Return the fix and the evidence about the store."""
    evidence = [f"torchrun keeps the job's store at {shortened(store.launcher)}"]
    if store.spawned:
        evidence.append("a worker of torchrun started this process")
        return _SPAWNED, tuple(evidence)
    return _NO_ADDRESS, tuple(evidence)


def _elsewhere(run: Run) -> ResourceFacts:
    """Return the facts that another process recorded, for a failure that only stderr reports."""
    here = (each for each in run.strays.of(ErrorRecord) if each.restart == run.restarts[-1])
    files = (each.file for each in here)
    return next((each for each in files if each and each.port is not None), NOTHING)


def _taken(facts: ResourceFacts) -> FailureFacts:
    holder = facts.holder
    if holder is None:
        return FailureFacts()
    failed = f"could not listen on port {facts.port}"
    who = f"pid {holder.pid}"
    name = shortened(holder.name, 100)
    evidence = (f"{who} holds it: {name}",) if name else ()
    if holder.itself:
        return FailureFacts(
            f"{failed}: this process holds it already",
            "Open the store once, and pass it on: init_process_group(store=...).",
        )
    if holder.ours:
        rank = holder.rank or ""
        known = f", started as rank {rank}" if rank.isdigit() else ""
        return FailureFacts(
            f"{failed}: another process of this job holds it ({who}{known})",
            _SPAWNED if facts.spawned else _OWN_RANK,
            evidence,
        )
    return FailureFacts(f"{failed}: a process of another job holds it ({who})", "", evidence)


# -- paths that differ between ranks, or that ranks race for


_PATH = re.compile(r"\[Errno \d+\][^']*'([^']+)'")
_TORN = re.compile(
    r"EOF|JSONDecodeError|UnpicklingError|Bad(Zip|Gzip)File|ArrowInvalid|ReadError|ParserError"
    r"|EmptyDataError|ScannerError|SafetensorError|struct\.error|zlib\.error|LZMAError|truncated"
    r"|zip archive|cannot reshape|magic|No data left|end of (file|data)|Ran out|unpickling",
    re.IGNORECASE,
)
"""Matches messages of readers about an incomplete file."""

MAX_RACE = 10_000_000_000
"""Maximum nanoseconds between operations of two ranks that race for a path."""
MAX_SINCE_READ = 2_000_000_000
"""Maximum nanoseconds from the reading of a file to an exception that follows from it."""

_PREPARE = (
    "Let one rank prepare it and the others wait in a barrier before they read it. Write it to a "
    "temporary name and os.replace it, so that no rank finds an incomplete one."
)
_ONE_NAME = (
    "Make the path on one rank and broadcast it (dist.broadcast_object_list): a name with the "
    "time, a random part or the process differs between the ranks."
)
_DOES = {
    "write": "opened it for writing",
    "make": "made it",
    "move": "moved it away",
    "replace": "moved a file to that name",
    "remove": "removed it",
}


@dataclass(frozen=True)
class PathFault:
    """The cause of an exception about a path, to append to its message, and the fix."""

    said: str
    fix: str


@dataclass(frozen=True)
class _Touch:
    """An operation of another rank on a path."""

    rank: int
    what: str
    file: str
    time: int
    at: Location | None


def path_fault(run: Run, cause: Ending) -> PathFault | None:
    """Explain an exception about a path by other ranks' operations. None if they do not."""
    name = cause.text.partition(":")[0].rpartition(".")[2]
    found = _PATH.search(cause.message or cause.text)
    if len(run.last) < 2:
        return None
    touched = list(_touched(run, cause.rank))
    if found is not None and name == "FileNotFoundError":
        return _absent(cause, found[1], touched) or _other_path(cause, found[1], touched)
    if found is not None and name in ("FileExistsError", "OSError"):
        return _made_twice(cause, found[1], touched)
    return _half_written(cause, touched)


def _touched(run: Run, but: int | None) -> Iterator[_Touch]:
    """Yield file operations of the other ranks, newest first."""
    found = []
    for rank in run.last:
        if rank.rank == but:
            continue
        for record in rank.records.of(FileRecord):
            place = record.location
            found.append(_Touch(rank.rank, record.what, record.file, record.time, place))
        for save in rank.records.of(SaveRecord):
            found.append(_Touch(rank.rank, "write", save.file, save.time, save.location))
    yield from sorted(found, key=lambda each: -each.time)


def _same(path: str, touch: _Touch) -> bool:
    return touch.file in (os.path.abspath(path), os.path.realpath(path))


def _holds(path: str, touch: _Touch) -> bool:
    """Return whether an operation concerns a path or a directory around it."""
    return _same(path, touch) or os.path.abspath(path).startswith(touch.file + os.sep)


def _did(touch: _Touch, time: int) -> str:
    """Describe another rank's operation on a path, with its time."""
    after = (touch.time - time) / 1e6
    when = f"{abs(after):.0f} ms {'later' if after > 0 else 'before'}"
    place = f" at {brief(touch.at)}" if touch.at is not None else ""
    return f"; rank {touch.rank} {_DOES[touch.what]}{place}, {when}"


def _absent(cause: Ending, path: str, touched: list[_Touch]) -> PathFault | None:
    """Explain a missing path that another rank created later or had removed."""
    away = ("move", "remove")
    made = [each for each in touched if _same(path, each) and each.what not in away]
    gone = [each for each in touched if _holds(path, each) and each.what in away]
    later = [each for each in made if each.time > cause.time - MAX_SINCE_READ]
    taken = [each for each in gone if 0 <= cause.time - each.time <= MAX_RACE]
    folder = [
        each
        for each in touched
        if each.what == "make"
        and each.time > cause.time - MAX_SINCE_READ
        and each.file == os.path.dirname(os.path.abspath(path))
    ]
    if taken:
        return PathFault(
            _did(taken[0], cause.time),
            "Let one rank remove or move it, behind a barrier that all ranks have reached.",
        )
    if later:
        return PathFault(_did(later[-1], cause.time), _PREPARE)
    if folder:
        said = _did(folder[-1], cause.time).replace(" made it", " made its directory")
        return PathFault(said, _PREPARE)
    return None


def _other_path(cause: Ending, path: str, touched: list[_Touch]) -> PathFault | None:
    """Explain a missing file that another rank wrote elsewhere."""
    for each in touched:
        same = os.path.basename(each.file) == os.path.basename(path)
        wrote = each.what in ("write", "replace") and each.time <= cause.time
        if same and wrote and not _same(path, each):
            return PathFault(f"; rank {each.rank} wrote it to another path, {each.file}", _ONE_NAME)
    return None


def _made_twice(cause: Ending, path: str, touched: list[_Touch]) -> PathFault | None:
    """Explain a path that another rank had just created, or a tree that both ranks removed."""
    fix = "Let one rank make it and the others wait in a barrier, or pass exist_ok=True."
    for each in touched:
        if _same(path, each) and 0 <= cause.time - each.time <= MAX_RACE:
            return PathFault(_did(each, cause.time), fix)
    try:
        made = opening.facts(path).st_ctime_ns
    except OSError:
        return None
    before = cause.time - made
    if not 0 <= before <= MAX_RACE // 10 or "FileExists" not in cause.text:
        return None
    return PathFault(f"; it was created or changed {before / 1e6:.0f} ms earlier", fix)


def _half_written(cause: Ending, touched: list[_Touch]) -> PathFault | None:
    """Explain a file that another rank was writing while this rank read it."""
    torn = _TORN.search(f"{cause.text} {cause.message}") is not None
    read = [(each.path, each.time) for each in cause.read]
    if cause.file.access == "read":
        read.insert(0, (cause.file.path, cause.time))
    for path, time in read:
        wrote = [
            each
            for each in touched
            if _same(path, each)
            and each.what in ("write", "replace")
            and 0 <= time - each.time <= MAX_RACE
        ]
        # A file that was moved into place is complete.
        if not wrote or wrote[0].what == "replace":
            continue
        if torn or (cause.time - time <= MAX_SINCE_READ and _changed_since(path, time)):
            return PathFault(
                f": it read {path} while another rank was writing it" + _did(wrote[0], time),
                _PREPARE,
            )
    return None


def _changed_since(path: str, time: int) -> bool:
    try:
        return opening.facts(path).st_mtime_ns > time
    except OSError:
        return False
