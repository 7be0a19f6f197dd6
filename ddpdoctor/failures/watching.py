"""Watch directories for logs that are written, and stop being written."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePath

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.failures.files import logs_inside

SETTLE = 10.0  # Seconds without a new line after which the logs of a job are read
POLL = 2.0  # Seconds between two looks at the files

_JOB = re.compile(r"(?<!\d)\d{3,}(?!\d)")
"""The number of a job in a file's name. Ranks have fewer digits."""

_PART = re.compile(r"(?i)(?:rank|node|worker|host|task)[-_ ]?\d+|^\d+$")
"""What differs in the names of the logs of one job."""


class Watch:
    """Finds the logs of jobs that were written since it began, once they are at rest.

    Args:
        names: Directories.
    """

    def __init__(self, names: Sequence[str]) -> None:
        for name in names:
            if not os.path.isdir(name):
                raise DoctorError(f"{name} is not a directory", "--watch takes directories of logs")
        self._names = names
        self._read = self._states()
        self._last = dict(self._read)
        self._changed: dict[str, float] = {}

    def settled(self) -> list[tuple[str, list[str]]]:
        """Return the jobs whose logs are at rest and have not been read, with all of their logs."""
        now, states = time.monotonic(), self._states()
        jobs: dict[str, list[str]] = defaultdict(list)
        for path, state in states.items():
            jobs[self._job(path)].append(path)
            if state != self._last.get(path):
                self._changed[path] = now
        self._last = states
        found = []
        for job, paths in sorted(jobs.items()):
            news = [path for path in paths if states[path] != self._read.get(path)]
            if news and all(now - self._changed.get(path, now) >= SETTLE for path in news):
                self._read.update({path: states[path] for path in news})
                found.append((job, sorted(paths)))
        return found

    def _states(self) -> dict[str, tuple[int, int]]:
        """Return the size and the time of the last change of each log."""
        states = {}
        for name in self._names:
            for path in logs_inside(Path(name)):
                try:
                    found = path.stat()
                except OSError:
                    continue
                states[str(path)] = (found.st_size, found.st_mtime_ns)
        return states

    def _job(self, path: str) -> str:
        """Return the job of a log.

        It is a directory, or files with the same number, or the same name but for a rank and the
        suffix.
        """
        folder = max((name for name in self._names if PurePath(path).is_relative_to(name)), key=len)
        first, *deeper = PurePath(path).relative_to(folder).parts
        if deeper:
            return os.path.join(folder, first)
        number = _JOB.search(first)
        job = number[0] if number else _PART.sub("", PurePath(first).stem).strip("-_. ")
        return os.path.join(folder, job) if job else folder
