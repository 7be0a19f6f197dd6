"""Tracebacks in a log, also where those of several ranks are woven into each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ddpdoctor.core.finding import Location
from ddpdoctor.core.opening import whole
from ddpdoctor.failures import Failure, recognise
from ddpdoctor.failures.lines import Line, users_file

HEAD = "Traceback (most recent call last)"
_ORIGINAL = "Original Traceback"
_MOST_LINES = 2_000
_STALE = 200
"""Lines of others after which a traceback is taken to be at its end."""

_FRAME = re.compile(r'^\s*File "(?P<path>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<name>.*))?$')
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: |:?$)")
_CHAIN = ("was the direct cause of the following", "another exception occurred")
_LOGGED = re.compile(r"^\[?[IWEF]\d{4} [\d:.]+")
"""What c10d and torchrun log has such a head, which no exception's message has."""


@dataclass
class Printed:
    """A traceback as it was printed.

    Attributes:
        start: Offset of its first line in the log.
        number: The number of that line.
        rank: Whose it is, if its lines say so.
        uncaught: torch's own mark stands before them.
        time: Seconds, if a line shortly before it has a time.
        lines: Its lines, without marks.
    """

    start: int
    number: int
    rank: int | None
    uncaught: bool
    time: float | None
    lines: list[str] = field(default_factory=list)
    last: int = 0
    """The number of its last line so far."""
    complete: bool = False
    """The line with the exception was seen; what follows may be the rest of its message."""

    def takes(self, line: Line) -> bool:
        """Add a line if it goes on with this traceback."""
        text = line.text
        head = HEAD in text
        if head and self.complete and not self._chained and not text.startswith(_ORIGINAL):
            return False
        if len(self.lines) >= _MOST_LINES or _LOGGED.match(text):
            return False
        indented = text[:1] in (" ", "\t", "") or not text.strip()
        chain = any(words in text for words in _CHAIN)
        exception = _EXCEPTION.match(text) is not None
        if not (indented or head or chain or self.uncaught or (exception and not self.complete)):
            return False
        if head:
            self.complete = False
        elif exception:
            self.complete = True
        self.lines.append(text)
        return True

    @property
    def _chained(self) -> bool:
        return any(words in each for each in self.lines[-3:] for words in _CHAIN)

    @property
    def headline(self) -> int | None:
        """Index of the line with the exception that ended it all; None if there is none."""
        last = max(number for number, text in enumerate(self.lines) if HEAD in text)
        return next(
            (n for n in range(last, len(self.lines)) if _EXCEPTION.match(self.lines[n])), None
        )

    @property
    def message(self) -> str:
        """The exception that ended it all, with the rest of its message; empty if torn."""
        at = self.headline
        return "" if at is None else "\n".join(text for text in self.lines[at:] if text.strip())

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(self.lines)

    @property
    def known(self) -> tuple[Failure | None, Mapping[str, str]]:
        """The failure that it shows, with its groups; none if it is unknown."""
        at = self.headline
        # The cause, or more of it, may stand earlier in a chain, or in a worker's own traceback.
        earlier = "\n".join(text for text in self.lines[:at] if _EXCEPTION.match(text))
        found = [recognise(text, self.text) for text in (self.message, earlier)]
        return max(
            (each for each in found if each is not None),
            key=lambda each: (each[0].weight, len(each[1])),
            default=(None, {}),
        )

    @property
    def location(self) -> Location | None:
        """The innermost line of the user's code."""
        for text in reversed(self.lines):
            match = _FRAME.match(text)
            if match and users_file(match["path"]):
                return Location(match["path"], whole(match["line"]))
        return None


def parse(text: str) -> Printed | None:
    """A traceback that was kept whole, as Python formats it; None if it is none."""
    lines = text.rstrip().splitlines()
    if not any(HEAD in line for line in lines):
        return None
    return Printed(0, 1, None, True, None, lines)


class Tracebacks:
    """The tracebacks under way, by the marks of their lines."""

    def __init__(self) -> None:
        self._open: dict[tuple[int | None, bool], Printed] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def take(
        self, line: Line, offset: int, number: int, when: Callable[[], float | None]
    ) -> tuple[bool, list[Printed]]:
        """Take a line in.

        Returns:
            Whether it belongs to a traceback, and those that have ended before it.
        """
        ended: list[Printed] = []
        if self._open and number % 64 == 0:
            stale = [key for key, each in self._open.items() if number - each.last > _STALE]
            ended = [self._open.pop(key) for key in stale]
        key = (line.rank, line.uncaught)
        current = self._open.get(key)
        if current is not None and current.takes(line):
            current.last = number
            return True, ended
        if current is not None:
            ended.append(self._open.pop(key))
        if HEAD not in line.text:
            return False, ended
        # What a progress bar left on that line does not belong to it.
        self._open[key] = Printed(
            offset, number, line.rank, line.uncaught, when(), [f"{HEAD}:"], number
        )
        return True, ended

    def rest(self) -> list[Printed]:
        """Those that the end of the log ended."""
        rest = list(self._open.values())
        self._open.clear()
        return rest
