"""Record which files a rank writes, makes, moves and removes, since other ranks may read them.

The audit hook of the entry calls this. Files of ddpdoctor, of caches of code and of devices do not
count. Which files were read last is kept for the record of an exception.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from ddpdoctor.probe.runtime import rank, shield
from ddpdoctor.probe.runtime.sites import caller
from ddpdoctor.run.records.process import FileRecord, ReadFile

MAX_TOUCHED = 64  # paths that a rank records
MAX_READ = 4  # files read last that are kept
_WRITES = os.O_WRONLY | os.O_RDWR
_CODE = (".py", ".pyc", ".so", ".pth")
_CACHES = ("__pycache__", "torchinductor", "triton", "/dev/", "/proc/", "/sys/")
_WHAT = {"os.mkdir": "make", "os.remove": "remove", "os.rmdir": "remove", "shutil.rmtree": "remove"}

_read: deque[ReadFile] = deque(maxlen=MAX_READ)
_known: set[tuple[str, str]] = set()  # what was recorded, and one thing more
_off = False  # in a forked child, which is no rank


def forget() -> None:
    """Leave the files of a forked child alone."""
    global _off
    _off = True


def read_last() -> tuple[ReadFile, ...]:
    """Return the files that were opened last for reading, the newest first."""
    return tuple(reversed(_read))


def _add(what: str, path: str) -> None:
    key = what, path
    if key in _known or len(_known) > MAX_TOUCHED or any(each in path for each in _CACHES):
        return
    _known.add(key)
    # A link is kept, since it may be what is moved.
    path = os.path.abspath(path)
    if not path.startswith(rank.run_directory()):
        record = FileRecord(time=time.time_ns(), what=what, file=path, **caller().place)
        rank.add(record, MAX_TOUCHED)


@shield.shielded
def touched(event: str, args: tuple[Any, ...]) -> None:
    """Note what an audited operation does to a file. It has not been done yet."""
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
