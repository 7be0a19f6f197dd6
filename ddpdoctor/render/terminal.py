"""Find out what an output can show; style, fit and wrap lines for it; keep a status line."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TextIO

from ddpdoctor.core.formatting import shown

if TYPE_CHECKING:
    from rich.style import Style

# rich is imported where it is used: the supervisor and `--help` do without it.

# -- colours


class Colour(NamedTuple):
    """One meaning, in every place that draws it."""

    light: str
    """On a light background, as ``#rrggbb``."""
    dark: str
    """On a dark one."""
    ansi: str
    """In a terminal of sixteen colours, as rich names it."""


PHASE_COLOURS = {
    "data": Colour("#d97706", "#f59e0b", "yellow"),
    "forward": Colour("#0ea5e9", "#38bdf8", "cyan"),
    "backward": Colour("#4f46e5", "#818cf8", "blue"),
    "optimizer": Colour("#15a34a", "#4ade80", "green"),
    "other": Colour("#a8745a", "#d0a183", "magenta"),
    "wait": Colour("#cbd5e1", "#475569", "bright_black"),
}
"""In the order in which a step's bar stacks them. Waiting recedes: who waits is not to blame."""

SEVERITY_COLOURS = {
    "error": Colour("#dc2626", "#f87171", "red"),
    "warning": Colour("#b45309", "#fbbf24", "yellow"),
    "info": Colour("#0e7490", "#67e8f9", "cyan"),
    "good": Colour("#15803d", "#4ade80", "green"),
}
"""``good`` is a job that succeeded."""


# -- styled lines of text for a terminal of any width


Span = tuple[str, str]
"""A text, and its style's name; empty: plain."""

Line = tuple[Span, ...]

_STYLES = {
    "": "",
    "dim": "dim",
    "bold": "bold",
    "head": "dim",
    "key": "bold",
    "cursor": "reverse",
    "ok": "green",
    "info": "cyan",
    "warning": "yellow",
    "error": "bold red",
    "status": "reverse",
    "bar": "cyan",
    "guilty": "bold reverse yellow",
    **{phase: colour.ansi for phase, colour in PHASE_COLOURS.items()},
    **{f"{name} meter": f"reverse {colour.ansi}" for name, colour in SEVERITY_COLOURS.items()},
    "grave": f"bold reverse {SEVERITY_COLOURS['error'].ansi}",
}


@lru_cache(maxsize=64)
def style_of(name: str) -> Style:
    """What a style looks like."""
    from rich.style import Style

    return Style.parse(_STYLES[name])


def text_width(text: str) -> int:
    """The columns a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def plain(line: Line) -> str:
    """A line's text."""
    return "".join(text for text, _ in line)


def fitted(line: Line, room: int) -> Line:
    """A line of exactly ``room`` columns: cut, or filled up with spaces."""
    spans: list[Span] = []
    left = room
    for text, style in line:
        if left <= 0:
            break
        taken = text_width(text)
        if taken > left:
            text, taken = fit(text, left), left
        if text:
            spans.append((text, style))
        left -= taken
    if left > 0:
        spans.append((" " * left, ""))
    return tuple(spans)


def fit(text: str, room: int) -> str:
    """A text of exactly ``room`` columns."""
    if text.isascii():
        return text[:room].ljust(room)
    from rich.cells import set_cell_size

    return set_cell_size(text, room)


def shortened(text: str, room: int, ellipsis: str) -> str:
    """A text of at most ``room`` columns, with an ellipsis where it was cut."""
    room = max(room, 0)
    if text_width(text) <= room:
        return text
    if room <= text_width(ellipsis):
        return fit(text, room)
    return fit(text, room - text_width(ellipsis)).rstrip() + ellipsis


def clean(text: str, ascii_only: bool) -> str:
    """A text for a line: what would steer a terminal is shown, tabs and newlines are spaces."""
    if not text.isprintable():
        text = shown(text.replace("\t", " ").replace("\n", " "))
    if ascii_only and not text.isascii():
        text = text.encode("ascii", "replace").decode()
    return text


def cleaned(line: Line, ascii_only: bool) -> Line:
    """A line all of whose texts are `clean`."""
    return tuple((clean(text, ascii_only), style) for text, style in line)


def merged(line: Line) -> Line:
    """The same line in as few spans as it has changes of style."""
    spans: list[Span] = []
    for text, style in line:
        if spans and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + text, style)
        else:
            spans.append((text, style))
    return tuple(spans)


def wrapped(text: str, room: int, style: str = "", indent: str = "") -> list[Line]:
    """A text in lines of at most ``room`` columns, each behind ``indent``."""
    width = max(room - len(indent), 1)
    return [
        ((f"{indent}{row}", style),)
        for paragraph in text.splitlines() or [""]
        for row in textwrap.wrap(paragraph, width) or [""]
    ]


def labelled(label: str, text: str, room: int, width: int, style: str = "") -> list[Line]:
    """A text behind a label of ``width`` columns, wrapped beside it."""
    if room < width + 12:
        return [((label, "dim"),), *wrapped(text, room, style, " ")]
    heads = [f"{label:<{width}}"]
    rows = wrapped(text, room - width, style)
    heads += [" " * width] * (len(rows) - 1)
    return [((head, "dim"), *row) for head, row in zip(heads, rows, strict=True)]


# -- what the terminal, or whatever else an output is, can show


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


# -- status line


class StatusLine:
    """The line, and lines that stay above it; from any thread.

    Args:
        stream: Where it stands; stderr if it is not given.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shows = self._stream.isatty() and not is_dumb()
        self._text = ""
        self._lock = threading.Lock()

    def show(self, text: str) -> None:
        """Put another text into the line."""
        with self._lock:
            if shown(text) != self._text:
                self._text = shown(text)
                self._draw()

    def say(self, text: str) -> None:
        """A line that stays, on a terminal or in a log."""
        text = shown(text, "\n")
        with self._lock:
            self._write(f"\r\x1b[K{text}\n" if self._shows else f"{text}\n")
            self._draw()

    def aside(self, write: Callable[[], None]) -> None:
        """Take the line away while something is written to another stream of the terminal."""
        with self._lock:
            if self._shows:
                self._write("\r\x1b[K")
            write()
            self._draw()

    def close(self) -> None:
        """Take the line away."""
        with self._lock:
            if self._shows:
                self._write("\r\x1b[K")
                self._shows = False

    def _draw(self) -> None:
        if not self._shows:
            return
        try:
            width = os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            width = 80
        text = self._text
        if len(text) >= width:
            text = text[: max(0, width - 4)] + "..."
        self._write(f"\r\x1b[K{text}")

    def _write(self, text: str) -> None:
        # The reader may be gone: that is no reason to end the work.
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()
