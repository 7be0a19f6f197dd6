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

CHAIN = 8  # maximum number of user lines that are kept of the calls that led to a hook

# By id, since hashing a code object hashes its whole content. `_codes` keeps the ids valid.
_codes: list[CodeType] = []
_is_user: dict[int, bool] = {}
_sites: dict[tuple[int, int], Site] = {}
memos: list[Any] = []
"""Objects of this module, or of ``_hot.c``, that remember lines. A child calls their `forget`."""


class Place(TypedDict):
    """A line of the user's code, as fields of a record."""

    path: str
    line: int


class Site:
    """A line of the user's code, with its text for the status page."""

    __slots__ = ("line", "page", "path", "recorded", "text")

    def __init__(self, path: str, line: int) -> None:
        self.path = path
        self.line = line
        self.text = f"{path}:{line}" if path else ""
        self.page = page_text(self.text)
        self.recorded = 0  # the phases, as bits, that were recorded as entered here

    @property
    def place(self) -> Place:
        """Return the line as fields of a record."""
        return {"path": self.path, "line": self.line}

    @property
    def location(self) -> Location:
        """Return the line as one field of a record."""
        return Location(self.path, self.line)


NOWHERE = Site("", 0)


def forget() -> None:
    """Forget the recorded lines in a forked child."""
    _sites.clear()
    NOWHERE.recorded = 0
    for each in memos:
        each.forget()


def site_of(frame: FrameType | None) -> Site:
    """Return the innermost user line at or above ``frame``."""
    return walk(frame, 1)[2][0]


def sites_of(frame: FrameType | None, most: int) -> list[Site]:
    """Return the user lines at and above ``frame``, innermost first, at most ``most``."""
    return [site for site in walk(frame, most)[2] if site is not NOWHERE]


_Known = tuple[tuple[tuple[CodeType, int], ...], bool, tuple[Site, ...]]
"""Frames with their instructions, whether outer frames do not matter, and the user lines."""


class Chain:
    """At most ``most`` user lines that lead to one hook, kept as long as all frames are the same.

    Hooks use the class of `ddpdoctor.probe.runtime.hot`, which may be compiled. A loop calls a hook
    through the same functions, from the same instructions, step after step. Each frame is compared,
    since another of the user's functions may have called.
    """

    __slots__ = ("_known", "_most")

    def __init__(self, most: int = CHAIN) -> None:
        self._most = most
        memos.append(self)
        self.forget()

    def forget(self) -> None:
        """Forget the frames."""
        # One assignment, since hooks are called in several threads.
        self._known: _Known = (), False, ()

    def sites(self) -> tuple[Site, ...]:
        """Return the user lines that led to the caller, innermost first, or `NOWHERE`."""
        frames, enough, found = self._known
        frame: FrameType | None = _getframe(1)
        for code, at in frames:
            if frame is None or frame.f_code is not code or frame.f_lasti != at:
                break
            frame = frame.f_back
        else:
            # The frames were the whole stack, or all of it that matters.
            if enough or frame is None:
                return found
        self._known = walk(_getframe(1), self._most)
        return self._known[2]


def walk(frame: FrameType | None, most: int) -> _Known:
    """Return the frames from ``frame`` outwards, and at most ``most`` user lines among them."""
    frames: list[tuple[CodeType, int]] = []
    found: list[Site] = []
    while frame is not None and len(found) < most:
        code = frame.f_code
        mine = _is_user.get(id(code))
        if mine is None:
            if len(_codes) >= _MAX_CACHED:
                _is_user.clear()
                _sites.clear()
                _codes.clear()
            _codes.append(code)
            mine = _is_user[id(code)] = user_file(code.co_filename)
        if mine:
            key = (id(code), frame.f_lineno)
            site = _sites.get(key)
            if site is None:
                site = _sites[key] = Site(os.path.abspath(code.co_filename), frame.f_lineno)
            found.append(site)
        frames.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(frames), len(found) == most, tuple(found) or (NOWHERE,)


def caller() -> Site:
    """Return the user line that led here."""
    return site_of(sys._getframe(1))
