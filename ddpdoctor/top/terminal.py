"""What the terminal, or whatever else stdout is, can show."""

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

    Where the locale is C, Python sets ``LC_CTYPE`` in its own (PEP 538), so that one does not tell.
    """
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
            return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    except OSError:
        return os.environ


def wants_colour(out: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether the output is a terminal that wants colour."""
    return out.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def size() -> tuple[int, int]:
    """Columns and lines of the terminal; 80 by 24 where there is none."""
    columns, lines = shutil.get_terminal_size((80, 24))
    return max(columns, 1), max(lines, 1)


def is_interactive() -> bool:
    """Whether there is a terminal to draw on and to read keys from."""
    return os.isatty(0) and os.isatty(1) and not is_dumb()


def is_dumb() -> bool:
    """Whether the terminal says that it can do nothing but print lines."""
    return os.environ.get("TERM") == "dumb"
