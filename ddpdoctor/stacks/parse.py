"""Reads what ``faulthandler`` writes: C code that knows no JSON, for it must work at any moment.

Source: ``Python/traceback.c`` (``_Py_DumpTraceback``, ``_Py_DumpTracebackThreads``) of CPython
3.10 to 3.14. Frames come innermost first, at most 100 of a thread; a text is cut after 500
characters, and what is not printable ASCII in it is escaped.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from ddpdoctor.core.opening import whole
from ddpdoctor.stacks.model import CUT, Frame, Thread

_FRAME = re.compile(
    r'  File (?:"(?P<path>.*)"|\?\?\?), line (?P<line>\d+|\?\?\?) in (?P<function>.*)$'
)
# "Current thread 0x00007f2f6c1b7740 (most recent call first):"; 3.14 has "[NAME]" before the
# bracket, and a build without the GIL more words in it.
_THREAD = re.compile(r"(?P<which>Current t|T)hread 0x(?P<ident>[0-9a-f]+)(?: \[(?P<name>.*)\])? \(")
_STACK = "Stack (most recent call first):"
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


def parse(text: str, directory: str = "") -> tuple[Thread, ...]:
    """The threads of a dump, or of several in a row, as they stand there.

    Args:
        text: What ``faulthandler`` wrote; lines that are not understood are skipped.
        directory: The working directory of the process, to which relative paths are taken to
            belong.
    """
    return tuple(_threads(text, directory))


def _threads(text: str, directory: str) -> Iterator[Thread]:
    begun: Thread | None = None
    frames: list[Frame] = []
    for line in text.splitlines():
        head = _head(line)
        if head is not None:
            if begun is not None:
                yield _with(begun, frames)
            begun, frames = head, []
        elif begun is not None and line.startswith("  "):
            match = _FRAME.match(line)
            if match:
                frames.append(_frame(match, directory))
            elif line == "  ...":
                frames.append(CUT)
        elif begun is not None:
            # The list of extension modules, say, which ends a dump.
            yield _with(begun, frames)
            begun = None
    if begun is not None:
        yield _with(begun, frames)


def _head(line: str) -> Thread | None:
    if line == _STACK:
        return Thread(0, "", True, ())
    match = _THREAD.match(line)
    if match is None:
        return None
    return Thread(int(match["ident"], 16), match["name"] or "", match["which"] != "T", ())


def _with(thread: Thread, frames: list[Frame]) -> Thread:
    return Thread(thread.ident, thread.name, thread.current, tuple(reversed(frames)))


def _frame(match: re.Match[str], directory: str) -> Frame:
    path = at(_unescaped(match["path"] or "???"), directory)
    line = match["line"]
    return Frame(path, whole(line), _unescaped(match["function"]))


def at(path: str, directory: str) -> str:
    """A frame's file, absolute if it is one and the working directory is known."""
    if not directory or path.startswith(("/", "<", "?")):
        return path
    return os.path.normpath(os.path.join(directory, path))


def _letter(match: re.Match[str]) -> str:
    code = int(match[1] or match[2] or match[3], 16)
    return chr(code) if code <= sys.maxunicode else "\N{REPLACEMENT CHARACTER}"


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(_letter, text)
