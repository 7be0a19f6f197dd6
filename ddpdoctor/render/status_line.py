"""A line on a terminal that says what a command does, while it does it; nothing anywhere else."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from ddpdoctor.core.control_characters import shown
from ddpdoctor.render import terminal


class StatusLine:
    """The line, and lines that stay above it; from any thread.

    Args:
        stream: Where it stands; stderr if it is not given.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shows = self._stream.isatty() and not terminal.is_dumb()
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
