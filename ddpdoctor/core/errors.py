"""Errors that are shown to people, and the handling of faults in ddpdoctor itself."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

from ddpdoctor import __version__
from ddpdoctor.core.plugins import OWNERS

USAGE = 2  # Exit status for bad input: an unknown option, a missing file, a damaged run directory
STRICT = 3  # Exit status of ``run --strict`` if the job succeeded and an error-level finding stands
HANG = 4  # Exit status of ``run --kill-on-hang`` if it ended a job that hung

INTERNAL = 70
"""Exit status of any command in which ddpdoctor itself failed (``EX_SOFTWARE`` of sysexits.h)."""


class DoctorError(Exception):
    """An error shown to a person as one line, with an optional hint instead of a traceback.

    Args:
        message: What is wrong, without a trailing full stop.
        hint: What to do about it. Empty if the message says it all.
        status: The exit status of the command that raised it.
    """

    def __init__(self, message: str, hint: str = "", status: int = USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.status = status

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class HelpRequest(Exception):
    """The command line asks for the help text, which is the message."""


# -- Faults of ddpdoctor: each disables the part that failed and is reported once


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MAX_PLACES = 4
_MAX_NAMES = 3
_MAX_CHARACTERS = 200  # Characters shown of an exception, which may contain text of the job

P = ParamSpec("P")
T = TypeVar("T")


class Fault(NamedTuple):
    """A failure of one part of ddpdoctor."""

    time: int  # Unix nanoseconds
    part: str
    error: str
    places: tuple[str, ...]  # Lines of ddpdoctor, innermost first


class Faults:
    """The parts that failed: codes of rules and names of other components.

    Each is said once, in a line that ends with ``rest``: what still works.
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
        """Return the result of ``look``, or None if the part fails or has failed before."""
        if part in self._broken:
            return None
        try:
            return look(*args, **kwargs)
        except Exception as error:
            self.failed([(part, error)])
        return None

    def failed(self, parts: Sequence[tuple[str, Exception]]) -> None:
        """Disable these parts and report all of them in one line."""
        fresh = [(part, error) for part, error in parts if part not in self._broken]
        if not fresh:
            return
        for part, error in fresh:
            self._broken.add(part)
            shown = repr(error)[:_MAX_CHARACTERS]
            self._fresh.append(Fault(time.time_ns(), part, shown, tuple(places(error))))
        for theirs in (False, True):
            group = [each for each in fresh if (each[0] in OWNERS) == theirs]
            if group:
                self._say(f"warning: {words(group)}; {self._rest}")

    def take(self) -> list[Fault]:
        """Return the failures since the last call."""
        taken, self._fresh = self._fresh, []
        return taken


def words(parts: Sequence[tuple[str, Exception]]) -> str:
    """Describe what failed and where, and say to whom to report it."""
    names = [part for part, _ in parts]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    error = parts[0][1]
    owner = OWNERS.get(names[0])
    if owner is not None:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"error in {', '.join(names[:_MAX_NAMES])}{more} of the plug-in {owner}: "
            f"{repr(error)[:_MAX_CHARACTERS]} at {at.filename}:{at.lineno} "
            "(report it to its authors)"
        )
    where = "".join(f" at {place}" for place in places(error)[:1])
    return (
        f"internal error in {', '.join(names[:_MAX_NAMES])}{more}: "
        f"{repr(error)[:_MAX_CHARACTERS]}{where} "
        f"(ddpdoctor {__version__}; please report this line)"
    )


def places(error: Exception) -> list[str]:
    """List the lines of ddpdoctor that an exception passed through, innermost first."""
    ours = [
        f"{frame.filename.removeprefix(_PACKAGE)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(_PACKAGE)
    ]
    return ours[: -_MAX_PLACES - 1 : -1]
