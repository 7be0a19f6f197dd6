"""Explain an exception about a path: the ranks used different paths, or raced for one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.core import opening
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.crashes.rank_endings import Ending
from ddpdoctor.diagnose.source_files import brief
from ddpdoctor.run.records.process import FileRecord
from ddpdoctor.run.records.training import SaveRecord
from ddpdoctor.run.snapshot import Run

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
