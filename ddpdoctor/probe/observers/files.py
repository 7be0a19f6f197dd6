"""Record which files a rank writes, creates, moves and removes, since other ranks may read them.

The audit hook of the entry calls this. Files of ddpdoctor, code caches and devices do not count.
The last files that were read are kept for the record of an exception.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from ddpdoctor.probe.runtime import rank, shield
from ddpdoctor.probe.runtime.sites import caller
from ddpdoctor.run.records.process import FileRecord, ReadFile

MAX_TOUCHED = 64  # maximum number of recorded paths
MAX_READ = 4  # number of last read files that are kept
_WRITES = os.O_WRONLY | os.O_RDWR
_CODE = (".py", ".pyc", ".so", ".pth")
_CACHES = ("__pycache__", "torchinductor", "triton", "/dev/", "/proc/", "/sys/")
_WHAT = {"os.mkdir": "make", "os.remove": "remove", "os.rmdir": "remove", "shutil.rmtree": "remove"}

_read: deque[ReadFile] = deque(maxlen=MAX_READ)
_known: set[tuple[str, str]] = set()  # recorded operations and paths, and one more
_off = False  # True in a forked child, which is not a rank


def forget() -> None:
    """Ignore the files of a forked child."""
    global _off
    _off = True


def read_last() -> tuple[ReadFile, ...]:
    """Return the last files opened for reading, newest first."""
    return tuple(reversed(_read))


def _add(what: str, path: str) -> None:
    key = what, path
    if key in _known or len(_known) > MAX_TOUCHED or any(each in path for each in _CACHES):
        return
    _known.add(key)
    # Do not resolve links: the link itself may be moved.
    path = os.path.abspath(path)
    if not path.startswith(rank.run_directory()):
        record = FileRecord(time=time.time_ns(), what=what, file=path, **caller().place)
        rank.add(record, MAX_TOUCHED)


@shield.shielded
def touched(event: str, args: tuple[Any, ...]) -> None:
    """Note what an audited operation is about to do to a file."""
    path = args[0]
    if _off or type(path) is not str:
        return
    if event != "open" and type(args[-1]) is int and args[-1] >= 0:
        return  # The path is relative to an open directory.
    if event == "open":
        flags = args[2]
        if type(flags) is not int or not flags & _WRITES:
            if not path.endswith(_CODE):
                _read.append(ReadFile(path, time.time_ns()))
            return
        _add("write", path)
    elif event == "os.rename":
        _add("move", path)
        if type(args[1]) is str:
            _add("replace", args[1])
    else:
        _add(_WHAT[event], path)
