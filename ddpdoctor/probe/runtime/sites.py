"""Which line of the user's code are we called from?"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import TypedDict

from ddpdoctor.core.location import Location
from ddpdoctor.core.user_code import user_file
from ddpdoctor.run.status import page_text

_MAX_CACHED = 4096

CHAIN = 8
"""Lines of the user's code, innermost first, that are kept of what led to a call."""

# By id, since hashing a code object hashes all that is in it; `_codes` keeps the ids valid.
_codes: list[CodeType] = []
_is_user: dict[int, bool] = {}
_sites: dict[tuple[int, int], Site] = {}


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
    while frame is not None:
        code = frame.f_code
        mine = _is_user.get(id(code))
        if mine is None:
            mine = _classify(code)
        if mine:
            return _site_at(code, frame.f_lineno)
        frame = frame.f_back
    return NOWHERE


def _site_at(code: CodeType, line: int) -> Site:
    key = (id(code), line)
    site = _sites.get(key)
    if site is None:
        site = _sites[key] = Site(os.path.abspath(code.co_filename), line)
    return site


def sites_of(frame: FrameType | None, most: int) -> list[Site]:
    """The user lines at and above ``frame``, innermost first, ``most`` of them."""
    found: list[Site] = []
    while frame is not None and len(found) < most:
        code = frame.f_code
        mine = _is_user.get(id(code))
        if _classify(code) if mine is None else mine:
            found.append(_site_at(code, frame.f_lineno))
        frame = frame.f_back
    return found


def caller() -> Site:
    """The user line that led here."""
    return site_of(sys._getframe(1))


def callers() -> tuple[Site, ...]:
    """The user lines that led here, innermost first; `NOWHERE` alone if there are none."""
    return tuple(sites_of(sys._getframe(1), CHAIN)) or (NOWHERE,)
