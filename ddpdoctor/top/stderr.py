"""The last lines of a job's stderr, and which rank each is of."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.control_characters import shown, without_formatting
from ddpdoctor.core.opening import whole
from ddpdoctor.run import rundir

LINES = 100
"""Lines that are shown of the whole job."""

OF_RANK = 40
"""Lines that are shown of a rank."""

_SIZE = 64 << 10
_BANNER = re.compile(
    r"(?:[A-Z]\d{4} [\d:.]+ \d+ \S*torch/distributed/run\.py:\d+\]"
    r"|\[[\d :,-]+\] torch\.distributed\.run: \[WARNING\]"
    r"|WARNING:torch\.distributed\.run:|WARNING:__main__:)?"
    r"\s*(?:\*{41}|Setting OMP_NUM_THREADS environment variable .*)?\s*"
)
"""What torchrun says of OMP_NUM_THREADS at the start of each job, in torch 1.13 to 2.13."""
_MARK = re.compile(r"\[(rank|default)(\d+)\]:\s?")


class Stderr:
    """Reads the end of stderr when it has changed.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._paths = (directory / rundir.STDERR, directory / rundir.STDERR_SO_FAR)
        self._seen: tuple[int, int, int] | None = None
        self.lines: tuple[str, ...] = ()
        self._marked: dict[tuple[str, int], tuple[str, ...]] = {}

    def read(self) -> None:
        """Look at it."""
        for path in self._paths:
            try:
                facts = path.lstat()
                seen = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
                if seen == self._seen:
                    return
                data = opening.ending(path, _SIZE)
            except OSError:
                continue
            self._seen = seen
            self._take(data)
            return

    def _take(self, data: bytes) -> None:
        marked: dict[tuple[str, int], deque[str]] = defaultdict(lambda: deque(maxlen=OF_RANK))
        last: deque[str] = deque(maxlen=LINES)
        for raw in data.decode("utf-8", "replace").split("\n"):
            # Of a progress bar what was drawn last counts.
            line = clean(raw.rstrip("\r").rpartition("\r")[2]).rstrip()
            if _BANNER.fullmatch(line):
                continue
            last.append(line)
            match = _MARK.match(line)
            if match:
                marked[match[1], whole(match[2])].append(line[match.end() :])
        self.lines = tuple(last)
        self._marked = {key: tuple(lines) for key, lines in marked.items()}

    def of(self, rank: int, local_rank: int | None, here: bool) -> tuple[str, ...]:
        """A rank's lines: torch marks them by rank, torchrun by the local rank on its node."""
        by_rank = self._marked.get(("rank", rank), ())
        if local_rank is None or not here:
            return by_rank
        return by_rank or self._marked.get(("default", local_rank), ())


def clean(text: str) -> str:
    """Text that cannot steer a terminal: without its colours, and all else is shown."""
    return shown(without_formatting(text.replace("\t", " ")))
