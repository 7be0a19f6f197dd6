"""Style, fit and wrap lines for a terminal, detect its capabilities, and keep a status line."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TextIO

from ddpdoctor.core.formatting import shown

if TYPE_CHECKING:
    from rich.style import Style

# rich is imported where it is used: the supervisor and `--help` do not need it.


class Colour(NamedTuple):
    """The colour of one meaning, in all outputs."""

    light: str  # On a light background, as ``#rrggbb``
    dark: str  # On a dark background
    ansi: str  # Rich's name for it in a terminal of sixteen colours


PHASE_COLOURS = {
    "data": Colour("#d97706", "#f59e0b", "yellow"),
    "forward": Colour("#0ea5e9", "#38bdf8", "cyan"),
    "backward": Colour("#4f46e5", "#818cf8", "blue"),
    "optimizer": Colour("#15a34a", "#4ade80", "green"),
    "other": Colour("#a8745a", "#d0a183", "magenta"),
    "wait": Colour("#cbd5e1", "#475569", "bright_black"),
}
"""Colours in the order of a step's bar. Waiting is grey: it is not the rank's fault."""

SEVERITY_COLOURS = {
    "error": Colour("#dc2626", "#f87171", "red"),
    "warning": Colour("#b45309", "#fbbf24", "yellow"),
    "info": Colour("#0e7490", "#67e8f9", "cyan"),
    "good": Colour("#15803d", "#4ade80", "green"),
}
"""``good`` is for a job that succeeded."""

# -- styled lines of text for a terminal of any width

Span = tuple[str, str]  # A text, and the name of its style. Empty means plain

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
    "warning": "bold yellow",
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
    """Return a style by its name."""
    from rich.style import Style

    return Style.parse(_STYLES[name])


def text_width(text: str) -> int:
    """Return the width of a text on a terminal in columns."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def plain(line: Line) -> str:
    """Return the text of a line."""
    return "".join(text for text, _ in line)


def fitted(line: Line, room: int) -> Line:
    """Cut a line to exactly ``room`` columns, or fill it up with spaces."""
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
    """Cut a text to exactly ``room`` columns, or fill it up with spaces."""
    if text.isascii():
        return text[:room].ljust(room)
    from rich.cells import set_cell_size

    return set_cell_size(text, room)


def shortened(text: str, room: int, ellipsis: str) -> str:
    """Cut a text to at most ``room`` columns, with an ellipsis at the cut."""
    room = max(room, 0)
    if text_width(text) <= room:
        return text
    if room <= text_width(ellipsis):
        return fit(text, room)
    return fit(text, room - text_width(ellipsis)).rstrip() + ellipsis


def clean(text: str, ascii_only: bool) -> str:
    """Return a text for a line: control characters made visible, tabs and newlines as spaces."""
    if not text.isprintable():
        text = shown(text.replace("\t", " ").replace("\n", " "))
    if ascii_only and not text.isascii():
        text = text.encode("ascii", "replace").decode()
    return text


def cleaned(line: Line, ascii_only: bool) -> Line:
    """Return a line after applying `clean` to its texts."""
    return tuple((clean(text, ascii_only), style) for text, style in line)


def merged(line: Line) -> Line:
    """Join neighbouring spans of the same style."""
    spans: list[Span] = []
    for text, style in line:
        if spans and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + text, style)
        else:
            spans.append((text, style))
    return tuple(spans)


def rendered(line: Line, colour: bool) -> str:
    """Return the text of a line, with ANSI colours if wanted."""
    if not colour:
        return plain(line)
    return "".join(style_of(style).render(text) for text, style in merged(line))


def wrapped(text: str, room: int, style: str = "", indent: str = "") -> list[Line]:
    """Wrap a text into lines of at most ``room`` columns, each after ``indent``."""
    width = max(room - len(indent), 1)
    return [
        ((f"{indent}{row}", style),)
        for paragraph in text.splitlines() or [""]
        for row in textwrap.wrap(paragraph, width) or [""]
    ]


def folded(text: str, room: int) -> list[str]:
    """Wrap a text at spaces and newlines. A longer word, such as a path, is kept whole."""
    rows = []
    for paragraph in text.split("\n"):
        row, *words = paragraph.split(" ")
        for word in words:
            if row and text_width(row) + 1 + text_width(word) > room:
                rows.append(row.rstrip())
                row = word
            else:
                row = f"{row} {word}"
        rows.append(row.rstrip())
    return rows


def labelled(label: str, text: str, room: int, width: int, style: str = "") -> list[Line]:
    """Wrap a text next to a label of ``width`` columns."""
    if room < width + 12:
        return [((label, "dim"),), *wrapped(text, room, style, " ")]
    rows = wrapped(text, room - width, style)
    heads = [f"{label:<{width}}", *[" " * width] * (len(rows) - 1)]
    return [((head, "dim"), *row) for head, row in zip(heads, rows, strict=True)]


# -- capabilities of the terminal, or of another output

_UNICODE = ("utf8", "utf16", "utf32", "gb18030")


def only_ascii(out: TextIO | None, environment: Mapping[str, str]) -> bool:
    """Return whether to draw in ASCII, because the locale is C or the output allows nothing else.

    The locale is taken from the environment at the start, see `given_environment`.
    """
    encoding = (getattr(out, "encoding", None) or "ascii").lower().replace("-", "")
    if encoding not in _UNICODE:
        return True
    names = ("LC_ALL", "LC_CTYPE", "LANG")
    locale = next((environment[name] for name in names if environment.get(name)), "C")
    charset = locale.partition("@")[0].partition(".")[2].lower().replace("-", "")
    # If the locale is not installed, Python uses UTF-8, but the terminal the named charset.
    return locale in ("C", "POSIX") or charset not in ("", *_UNICODE)


def given_environment() -> Mapping[str, str]:
    """Return the environment as it was at the start.

    In the C locale Python sets ``LC_CTYPE`` itself (PEP 538), so `os.environ` does not show it.
    """
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
            return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    except OSError:
        return os.environ


def wants_colour(descriptor: int = 2) -> bool:
    """Return whether to write colours: to a terminal, without ``NO_COLOR`` and ``TERM=dumb``."""
    return os.isatty(descriptor) and not os.environ.get("NO_COLOR") and not is_dumb()


def width(descriptor: int) -> int | None:
    """Return the columns to write, from 40 to 100. None if the output is not a terminal."""
    try:
        return max(40, min(os.get_terminal_size(descriptor).columns, 100))
    except OSError:
        return None


UNWRAPPED = 1 << 20  # Columns of a pipe, for which nothing is wrapped or cut


def columns(most: int) -> int:
    """Return the columns of standard output: ``COLUMNS``, or the terminal's, at most ``most``."""
    known = shutil.get_terminal_size((0, 0)).columns
    return min(known, most) if known else UNWRAPPED


def is_interactive() -> bool:
    """Return whether there is a terminal for drawing and for keys."""
    return os.isatty(0) and os.isatty(1) and not is_dumb()


def is_dumb() -> bool:
    """Return whether the terminal can only print lines."""
    return os.environ.get("TERM") == "dumb"


class StatusLine:
    """A line that is replaced in place, below lines that stay. Any thread may use it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shows = self._stream.isatty() and not is_dumb()
        self._text = ""
        self._lock = threading.Lock()

    def show(self, text: str) -> None:
        """Replace the text of the line."""
        with self._lock:
            if shown(text) != self._text:
                self._text = shown(text)
                self._draw()

    def say(self, text: str) -> None:
        """Print a line that stays, on a terminal or in a log."""
        text = shown(text, "\n")
        with self._lock:
            self._write(f"\r\x1b[K{text}\n" if self._shows else f"{text}\n")
            self._draw()

    def close(self) -> None:
        """Remove the line."""
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
        # The work continues without a reader.
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()
