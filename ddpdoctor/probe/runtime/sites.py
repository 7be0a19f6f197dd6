"""Find the line of the user's code that a hook was called from."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import Any, TypedDict

from ddpdoctor.core.user_code import Location, user_file
from ddpdoctor.run.status import page_text

_getframe = sys._getframe
_MAX_CACHED = 4096

CHAIN = 8
"""Lines of the user's code, innermost first, that are kept of what led to a call."""

# By id, since hashing a code object hashes all that is in it; `_codes` keeps the ids valid.
_codes: list[CodeType] = []
_is_user: dict[int, bool] = {}
_sites: dict[tuple[int, int], Site] = {}
memos: list[Any] = []
"""Those that remember lines, of this module or of ``_hot.c``: they are to `forget` in a child."""


class Place(TypedDict):
    """A line of the user's code, as records have it."""

    path: str
    line: int


class Site:
    """A line of the user's code, ready for the status page."""

    __slots__ = ("line", "page", "path", "recorded", "text")

    def __init__(self, path: str, line: int) -> None:
        self.path = path
        self.line = line
        self.text = f"{path}:{line}" if path else ""
        self.page = page_text(self.text)
        self.recorded = 0
        """The phases, as bits, that were recorded as entered here."""

    @property
    def place(self) -> Place:
        """The line as a part of a record's fields."""
        return {"path": self.path, "line": self.line}

    @property
    def location(self) -> Location:
        """The line as a field of a record."""
        return Location(self.path, self.line)


NOWHERE = Site("", 0)


def forget() -> None:
    """In a forked child: nothing has been recorded yet."""
    _sites.clear()
    NOWHERE.recorded = 0
    for each in memos:
        each.forget()


def _classify(code: CodeType) -> bool:
    if len(_codes) >= _MAX_CACHED:
        _is_user.clear()
        _sites.clear()
        _codes.clear()
    _codes.append(code)
    mine = _is_user[id(code)] = user_file(code.co_filename)
    return mine


def site_of(frame: FrameType | None) -> Site:
    """The innermost user line at or above ``frame``."""
    return walk(frame, 1)[2][0]


def _site_at(code: CodeType, line: int) -> Site:
    key = (id(code), line)
    site = _sites.get(key)
    if site is None:
        site = _sites[key] = Site(os.path.abspath(code.co_filename), line)
    return site


def sites_of(frame: FrameType | None, most: int) -> list[Site]:
    """The user lines at and above ``frame``, innermost first, ``most`` of them."""
    return [site for site in walk(frame, most)[2] if site is not NOWHERE]


_Known = tuple[tuple[tuple[CodeType, int], ...], bool, tuple[Site, ...]]
"""Frames with their instructions, whether those further out do not matter, and the lines."""


class Chain:
    """The user lines that lead to one hook, found again if all frames are where they were.

    Hooks take the one of `ddpdoctor.probe.runtime.hot`, which may be compiled. A loop calls a hook
    through the same functions, from the same instructions, step after step.
    Each of the frames is compared, since a function of the user's may have come in between.

    Args:
        most: How many lines are wanted.
    """

    __slots__ = ("_known", "_most")

    def __init__(self, most: int = CHAIN) -> None:
        self._most = most
        memos.append(self)
        self.forget()

    def forget(self) -> None:
        """Begin again, with a walk."""
        # In one piece: hooks are called in several threads.
        self._known: _Known = (), False, ()

    def sites(self) -> tuple[Site, ...]:
        """The user lines that led to the caller, innermost first; `NOWHERE` if there are none."""
        frames, enough, found = self._known
        frame: FrameType | None = _getframe(1)
        for code, at in frames:
            if frame is None or frame.f_code is not code or frame.f_lasti != at:
                break
            frame = frame.f_back
        else:
            # Either all of the stack, or as much of it as is wanted.
            if enough or frame is None:
                return found
        self._known = walk(_getframe(1), self._most)
        return self._known[2]


def walk(frame: FrameType | None, most: int) -> _Known:
    """The frames from ``frame`` outwards, and the user lines among them, ``most`` of these."""
    frames: list[tuple[CodeType, int]] = []
    found: list[Site] = []
    while frame is not None and len(found) < most:
        code = frame.f_code
        mine = _is_user.get(id(code))
        if _classify(code) if mine is None else mine:
            found.append(_site_at(code, frame.f_lineno))
        frames.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(frames), len(found) == most, tuple(found) or (NOWHERE,)


def caller() -> Site:
    """The user line that led here."""
    return site_of(sys._getframe(1))
