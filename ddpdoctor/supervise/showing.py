"""What the supervisor puts into the run directory for who watches the job live, or later."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddpdoctor.run import rundir
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.reported import Event, to_journal
from ddpdoctor.supervise.passthrough import Passthrough

SHOWN = 64 << 10
"""Bytes of the job's stderr that are shown."""

EVERY = 1.0
"""Seconds between two looks at it."""


class Showing:
    """Shows the findings that were said, and the last of the job's stderr.

    Args:
        directory: The run directory.
        passthrough: Carries the job's stderr.
    """

    def __init__(self, directory: Path, passthrough: Passthrough) -> None:
        self._file = directory / rundir.STDERR_SO_FAR
        self._passthrough = passthrough
        self._due = 0.0
        self._shown = 0

    def look(self, *, at_once: bool = False) -> None:
        """Show what the job wrote since, at most once a second unless it matters ``at_once``."""
        now, carried = time.monotonic(), self._passthrough.carried
        if carried == self._shown or (now < self._due and not at_once):
            return
        self._due, self._shown = now + EVERY, carried
        # Where the disk is full, it cannot be seen; the journal says so.
        with contextlib.suppress(OSError):
            rundir.put(self._file, self._passthrough.last(SHOWN))

    def news(self, events: Iterable[Event], taken: int) -> Iterator[Record]:
        """The journal's records of what was said, and withdrawn, of a snapshot ``taken`` then."""
        return (to_journal(each, taken) for each in events)

    def end(self) -> None:
        """The whole end of stderr is in its own file now."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


def keep_stderr(directory: Path, passthrough: Passthrough) -> None:
    """Keep the end of the job's stderr: the verdict of a crash may depend on it."""
    with contextlib.suppress(OSError):
        rundir.put(directory / rundir.STDERR, bytes(passthrough.tail))
