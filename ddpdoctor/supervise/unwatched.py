"""Interpreters that the probe cannot enter: by their options, environment or age.

It comes by the ``sitecustomize`` of a folder on PYTHONPATH. ``-S`` imports none; ``-I`` and ``-E``
do not read that variable; a wrapper may start the ranks without it (``env -i``, ``sudo``); and it
needs Python 3.10.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence

from ddpdoctor.run.records.supervisor import UnwatchedRecord
from ddpdoctor.system import proc

_PYTHON = re.compile(r"python(\d+(\.\d+)*t?)?$")
_OLD = re.compile(r"python(2|2\.\d+|3\.\d)$")
"""The program of a Python before 3.10."""
_BARE = "SIE"
"""Options of Python that keep the probe out."""
_WITH_VALUE = "WX"
_NO_PYTHON = ("--no-python", "--no_python")
_LAST = "cm"
"""What follows these is the program."""
_MOST = 4096
"""Processes of a job that are looked at."""


def bare_option(words: Sequence[str], through_torchrun: bool = False) -> str:
    """The option of a command's ``python`` that keeps the probe out, ``-S``; empty if none.

    torchrun starts its ranks without such options, unless it starts a program that is no script.
    """
    if through_torchrun:
        programs = [place for place, word in enumerate(words) if word in _NO_PYTHON]
        words = words[programs[0] + 1 :] if programs else ()
    for place, word in enumerate(words):
        if _PYTHON.match(os.path.basename(word)):
            # Words behind its script are the script's.
            return _option(words[place + 1 :])
    return ""


def _option(words: Sequence[str]) -> str:
    """The first such option among those of one ``python``."""
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(rest, None)
            continue
        if not word.startswith("-") or word == "-":
            return ""
        for place, letter in enumerate(word[1:], 1):
            if letter in _BARE:
                return f"-{letter}"
            if letter in _LAST:
                return ""
            if letter in _WITH_VALUE:
                if place + 1 == len(word):
                    next(rest, None)
                break
    return ""


def of_option(option: str) -> str:
    """Why no rank can be watched, for a sentence."""
    return f"`python {option}` does not load ddpdoctor's probe"


class Unwatched:
    """Looks for ranks that run without the probe, as long as no rank has come with it.

    Args:
        entry: The folder on PYTHONPATH by which the probe comes.
    """

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._reported = False

    def look(self, root: int) -> Iterator[UnwatchedRecord]:
        """What is new of the processes below ``root``: at most one record in a run."""
        why = "" if self._reported else next(filter(None, map(self._reason, _ranks(root))), "")
        if why:
            self._reported = True
            yield UnwatchedRecord(time=time.time_ns(), why=why)

    def _reason(self, pid: int) -> str:
        option = bare_option(proc.words(pid))
        if option:
            return of_option(option)
        old = _OLD.search(_program(pid))
        if old:
            return f"Python {old[1]} is too old for ddpdoctor's probe, which needs 3.10"
        paths = proc.environ(pid).get("PYTHONPATH", "").split(os.pathsep)
        if self._entry in paths:
            return ""
        return "PYTHONPATH, through which ddpdoctor's probe is loaded, was changed for the ranks"


def _program(pid: int) -> str:
    """Return the file that a process runs, or nothing if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def _ranks(root: int) -> Iterator[int]:
    """Interpreters below a process that were started as ranks; not what these start in turn."""
    waiting, seen = [(root, "")], 0
    while waiting and seen < _MOST:
        pid, above = waiting.pop()
        seen += 1
        rank = proc.environ(pid).get("RANK", "")
        python = _PYTHON.match(os.path.basename(next(iter(proc.words(pid)), "")))
        if python and rank and rank != above:
            yield pid
        inside = rank if python and rank else above
        waiting += [(child, inside) for child in proc.children(pid)]
