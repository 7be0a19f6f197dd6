"""The exception that another one wraps, where it says more: a cause, a part, a worker's text."""

from __future__ import annotations

import os
import re
import traceback
from typing import NamedTuple

from ddpdoctor.core.user_code import user_file

Frames = list[tuple[str, int, str]]
"""Path, line and function of the user's frames, the innermost last."""

_FILE_LINE = re.compile(r'File "([^"\n]+)", line (\d+)')
_HEADLINE = re.compile(r"^[A-Za-z_][\w.]*(?:: |:?$)")
_WORKER = "Original Traceback (most recent call last)"
_MOST = 8
"""Exceptions of a chain that are looked at."""


class Raised(NamedTuple):
    """An exception in words."""

    name: str
    message: str
    path: str
    line: int


def unwrapped(error: BaseException) -> tuple[Raised, Raised | None]:
    """What to report of an exception, and what it was wrapped in, if it was.

    An inner exception counts if it came through the user's own code and says something: what a
    library catches and rewords is better known by the library's words.
    """
    outer = _plain(error)
    current = error
    for _ in range(_MOST):
        part = _first_part(current) or current.__cause__
        if part is None or not frames(part) or not text(part):
            break
        current = part
    inner = _of_worker(current) or _plain(current)
    remote = _remote(current)
    if remote:
        inner = inner._replace(path=remote[0], line=remote[1])
    return inner, None if inner[:2] == outer[:2] else outer


def text(error: object) -> str:
    """A message, mostly that of an exception; never raises."""
    try:
        return str(error)
    except Exception:
        return "(its message could not be made)"


def name_of(kind: type[BaseException]) -> str:
    """The class as Python prints it."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def frames(error: BaseException) -> Frames:
    """The user's frames that it flew through."""
    return [
        (os.path.abspath(frame.f_code.co_filename), number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if user_file(frame.f_code.co_filename)
    ]


def _plain(error: BaseException) -> Raised:
    path, line = "", 0
    if isinstance(error, SyntaxError) and error.filename:
        path, line = os.path.abspath(error.filename), error.lineno or 0
    elif found := frames(error):
        path, line = found[-1][:2]
    return Raised(name_of(type(error)), text(error), path, line)


def _first_part(error: BaseException) -> BaseException | None:
    """The first exception of a group; groups exist from Python 3.11 on."""
    parts = getattr(error, "exceptions", None)
    is_group = any(each.__name__ == "BaseExceptionGroup" for each in type(error).__mro__)
    if not is_group or not isinstance(parts, tuple) or not parts:
        return None
    return parts[0] if isinstance(parts[0], BaseException) else None


def _of_worker(error: BaseException) -> Raised | None:
    """The exception of a DataLoader's worker, which is raised again in the rank with its text."""
    _, head, rest = text(error).partition(_WORKER)
    if not head:
        return None
    lines = rest.splitlines()
    last = max((n for n, line in enumerate(lines) if _FILE_LINE.search(line)), default=-1)
    at = next((n for n in range(last + 1, len(lines)) if _HEADLINE.match(lines[n])), None)
    if at is None:
        return None
    name, _, message = "\n".join(lines[at:]).strip().partition(": ")
    path, line = _last_user_line(rest) or _plain(error)[2:]
    return Raised(name.rstrip(":"), message, path, line)


def _remote(error: BaseException) -> tuple[str, int] | None:
    """The line in the process of a pool, whose traceback travels as text."""
    cause = error.__cause__
    if cause is None or type(cause).__name__ not in ("_RemoteTraceback", "RemoteTraceback"):
        return None
    return _last_user_line(text(cause))


def _last_user_line(printed: str) -> tuple[str, int] | None:
    found = [each for each in _FILE_LINE.findall(printed) if user_file(each[0])]
    return (os.path.abspath(found[-1][0]), int(found[-1][1])) if found else None
