"""Errors for people, and what happens to faults of our own."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

from ddpdoctor import __version__
from ddpdoctor.core.plugins import OWNERS

# -- the one exception whose text a user may see instead of a traceback


USAGE = 2
"""Exit status for bad input: an unknown option, a missing file, a damaged run directory."""

STRICT = 3
"""Exit status of ``run --strict`` when the job succeeded and an error-level finding stands."""

HANG = 4
"""Exit status of ``run --kill-on-hang`` when it ended a job that hung."""

INTERNAL = 70
"""Exit status of any command in which ddpdoctor itself failed (``EX_SOFTWARE`` of sysexits.h)."""


class DoctorError(Exception):
    """Something a person has to know, said in one line, with one line on what to do.

    Args:
        message: What is wrong, without a trailing full stop.
        hint: What to do about it; empty when the message says it all.
        status: The exit status of the command that raised it.
    """

    def __init__(self, message: str, hint: str = "", status: int = USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.status = status

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


# -- faults of ddpdoctor's own: each ends the part that it is in, and is said once


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PLACES = 4
"""Lines of ours, innermost first, that the record of a fault names."""
_SHOWN = 3
_MOST = 200
"""Characters of an exception that are shown: it may hold what the job wrote."""

P = ParamSpec("P")
T = TypeVar("T")


class Fault(NamedTuple):
    """A part failed."""

    time: int
    """Unix nanoseconds."""
    part: str
    error: str
    places: tuple[str, ...]
    """Lines of ours, innermost first."""


class Faults:
    """Which parts failed: the codes of rules, and the names of what else looks at a job.

    Args:
        say: Says a line that a person has to see.
        rest: What becomes of all else, for that line.
    """

    def __init__(
        self, say: Callable[[str], None], rest: str = "the job and all other checks go on"
    ) -> None:
        self._say = say
        self._rest = rest
        self._broken: set[str] = set()
        self._fresh: list[Fault] = []

    def __contains__(self, part: str) -> bool:
        return part in self._broken

    def guarded(
        self, part: str, look: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """What ``look`` returns; None if it failed now, or ``part`` did before."""
        if part in self._broken:
            return None
        try:
            return look(*args, **kwargs)
        except Exception as error:
            self.failed([(part, error)])
        return None

    def failed(self, parts: Sequence[tuple[str, Exception]]) -> None:
        """These failed: they end, and all of them are said in one line."""
        fresh = [(part, error) for part, error in parts if part not in self._broken]
        if not fresh:
            return
        for part, error in fresh:
            self._broken.add(part)
            shown, where = repr(error)[:_MOST], tuple(places(error))
            self._fresh.append(Fault(time.time_ns(), part, shown, where))
        for theirs in (False, True):
            group = [each for each in fresh if (each[0] in OWNERS) == theirs]
            if group:
                self._say(f"warning: {words(group)}; {self._rest}")

    def take(self) -> list[Fault]:
        """What failed since the last call."""
        taken, self._fresh = self._fresh, []
        return taken


def words(parts: Sequence[tuple[str, Exception]]) -> str:
    """Say what failed and where, and to whom to report it."""
    names = [part for part, _ in parts]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    error = parts[0][1]
    owner = OWNERS.get(names[0])
    if owner is not None:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"error in {', '.join(names[:_SHOWN])}{more} of the plug-in {owner}: "
            f"{repr(error)[:_MOST]} at {at.filename}:{at.lineno} (report it to its authors)"
        )
    where = "".join(f" at {place}" for place in places(error)[:1])
    return (
        f"internal error in {', '.join(names[:_SHOWN])}{more}: {repr(error)[:_MOST]}{where} "
        f"(ddpdoctor {__version__}; please report this line)"
    )


def places(error: Exception) -> list[str]:
    """The lines of ours that an exception came through, innermost first."""
    ours = [
        f"{frame.filename.removeprefix(_PACKAGE)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(_PACKAGE)
    ]
    return ours[: -_PLACES - 1 : -1]
