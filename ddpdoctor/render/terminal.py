"""What the terminal, or whatever else an output is, can show."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import TextIO

_UNICODE = ("utf8", "utf16", "utf32", "gb18030")


def only_ascii(out: TextIO | None, environment: Mapping[str, str]) -> bool:
    """Whether to draw in ASCII: the locale is C, or the output can hold nothing else.

    Args:
        out: Where the text goes.
        environment: The environment that the process was started with, see `given_environment`.
    """
    encoding = (getattr(out, "encoding", None) or "ascii").lower().replace("-", "")
    if encoding not in _UNICODE:
        return True
    names = ("LC_ALL", "LC_CTYPE", "LANG")
    locale = next((environment[name] for name in names if environment.get(name)), "C")
    charset = locale.partition("@")[0].partition(".")[2].lower().replace("-", "")
    # Python takes UTF-8 where the locale is not installed; the terminal keeps what was named.
    return locale in ("C", "POSIX") or charset not in ("", *_UNICODE)


def given_environment() -> Mapping[str, str]:
    """The environment as it was at the start.

    Where the locale is C, Python sets ``LC_CTYPE`` itself (PEP 538), so `os.environ` is no use.
    """
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
            return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    except OSError:
        return os.environ


def wants_colour(descriptor: int = 2) -> bool:
    """Whether a terminal is there that wants colour (``NO_COLOR``, ``TERM=dumb`` say no)."""
    return os.isatty(descriptor) and not os.environ.get("NO_COLOR") and not is_dumb()


def width(descriptor: int) -> int | None:
    """Columns to write for, from 40 to 100; None if it is no terminal."""
    try:
        return max(40, min(os.get_terminal_size(descriptor).columns, 100))
    except OSError:
        return None


UNWRAPPED = 1 << 16
"""Columns for who reads from a pipe: nothing is wrapped or cut for want of room."""


def columns(most: int) -> int:
    """Columns to write for on standard output: ``COLUMNS``, or the terminal's, at most so many."""
    known = shutil.get_terminal_size((0, 0)).columns
    return min(known, most) if known else UNWRAPPED


def is_interactive() -> bool:
    """Whether there is a terminal to draw on and to read keys from."""
    return os.isatty(0) and os.isatty(1) and not is_dumb()


def is_dumb() -> bool:
    """Whether the terminal says that it can do nothing but print lines."""
    return os.environ.get("TERM") == "dumb"
