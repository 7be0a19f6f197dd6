"""Find and read the files to check: Python files, notebooks and launch files."""

from __future__ import annotations

import ast
import json
import os
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.lint import launch_files

MAX_SIZE = 8 << 20
"""The largest file that is read, in bytes."""

_SUFFIXES = (".py", ".ipynb", *launch_files.SUFFIXES)
_SKIPPED = frozenset(
    (
        *(".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", ".eggs", "__pycache__"),
        *(".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules", "site-packages"),
        *("build", "dist", ".ipynb_checkpoints"),
    )
)
"""Folders that the search skips."""

_MAGIC = re.compile(r"^\s*(?:[%!?]|[\w., ]+=\s*[%!])|\?\s*$")
"""A line of a notebook that only IPython understands."""

_SPACES = str.maketrans(dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000", " ") | {"\ufeff": ""})
"""Spaces that code pasted from web pages contains."""


@dataclass(frozen=True)
class Place:
    """A line number in a file, or in a cell of a notebook."""

    line: int
    cell: int = 0
    """The number of the code cell, from 1. 0 in a Python file."""


@dataclass
class SourceFile:
    """A file that was read.

    Attributes:
        path: The path as it was given.
        lines: Its lines of Python.
        tree: Its syntax tree. None if it does not parse.
        error: Why it does not parse, with the line and the column from 1.
        cells: For each line of a notebook's Python, its place.
        launch: The text of a launch file, which is no Python.
    """

    path: str
    lines: list[str]
    tree: ast.Module | None = None
    error: tuple[str, int, int] | None = None
    cells: Sequence[Place] = ()
    launch: str = ""

    def place(self, line: int) -> Place:
        """Return the place of a line of the Python source."""
        return self.cells[line - 1] if 0 < line <= len(self.cells) else Place(line)


def find(paths: Sequence[str]) -> Iterator[str]:
    """Yield each file below some paths once, also if links form a circle.

    Raises:
        DoctorError: A path does not exist.
    """
    seen: set[tuple[int, int]] = set()
    for path in paths:
        if not os.path.exists(path):
            raise DoctorError(f"there is no {path}", "name Python files, notebooks or folders")
        if not os.path.isdir(path):
            if _is_new(path, seen):
                yield path
            continue
        for folder, folders, names in os.walk(path, followlinks=True):
            folders[:] = sorted(
                name
                for name in folders
                if name not in _SKIPPED and _is_new(os.path.join(folder, name), seen)
            )
            for name in sorted(names):
                file = os.path.join(folder, name)
                if name.endswith(_SUFFIXES) and os.path.isfile(file) and _is_new(file, seen):
                    yield os.path.normpath(file)


def _is_new(path: str, seen: set[tuple[int, int]]) -> bool:
    try:
        stat = os.stat(path)
    except OSError:
        return False
    key = stat.st_dev, stat.st_ino
    if key in seen:
        return False
    seen.add(key)
    return True


def read(path: str) -> SourceFile:
    """Read and parse a file. A file that cannot be read has an error and no tree."""
    try:
        data = opening.contents(path, MAX_SIZE, links=True)
    except (OSError, ValueError) as error:
        return SourceFile(path, [], error=(f"cannot be read: {_reason(error)}", 1, 1))
    return parse(path, data)


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def parse(path: str, data: bytes) -> SourceFile:
    """Parse a file's content."""
    cells: list[Place] = []
    if path.endswith(launch_files.SUFFIXES):
        text = data.decode("utf-8", "replace")
        launch = text if launch_files.is_launch_file(path, text) else ""
        return SourceFile(path, text.splitlines(), launch=launch)
    if path.endswith(".ipynb"):
        try:
            lines, cells = _notebook(data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return SourceFile(path, [], error=("this is no notebook", 1, 1))
    else:
        lines = _decoded(data).splitlines()
    file = SourceFile(path, lines, cells=cells)
    text = "\n".join(lines) + "\n"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file.tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line, column = getattr(error, "lineno", None) or 1, getattr(error, "offset", None) or 1
        file.error = (_why(error, lines, line), min(line, max(len(lines), 1)), max(column, 1))
    except (RecursionError, MemoryError):
        file.error = ("the code is nested too deeply", 1, 1)
    return file


_PRINT = re.compile(
    r"^\s*(?:print\s+[\"'\w]|exec\s+[\"'\w]|raise\s+\w+\s*,|except\s+\w+\s*,\s*\w+\s*:)"
)


def _why(error: Exception, lines: Sequence[str], line: int) -> str:
    said = getattr(error, "msg", None) or str(error)
    text = lines[line - 1] if 0 < line <= len(lines) else ""
    return "this is Python 2" if _PRINT.match(text) else f"this does not parse: {said}"


def _decoded(data: bytes) -> str:
    """Decode a file by its byte order mark or declared encoding, or as UTF-8 if that fails."""
    for start, encoding in ((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if data.startswith(start):
            return data.decode(encoding, "replace").translate(_SPACES)
    try:
        encoding, _ = tokenize.detect_encoding(BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, LookupError, UnicodeDecodeError):
        text = data.decode("utf-8", "replace")
    return text.translate(_SPACES).replace("\x00", "").replace("\x0c", " ")


def _notebook(data: bytes) -> tuple[list[str], list[Place]]:
    """Return the Python of a notebook's code cells, and the place of each line."""
    lines: list[str] = []
    places: list[Place] = []
    number = 0
    for cell in json.loads(data.decode("utf-8-sig", "replace"))["cells"]:
        if cell.get("cell_type") != "code":
            continue
        number += 1
        source = cell.get("source", "")
        text = source if isinstance(source, str) else "".join(map(str, source))
        own = text.translate(_SPACES).splitlines()
        # A whole cell of another language, such as %%bash.
        foreign = (
            bool(own) and own[0].startswith("%%") and not own[0].startswith(("%%time", "%%capture"))
        )
        for at, line in enumerate(own, 1):
            blank = line[: len(line) - len(line.lstrip())] + "pass"
            lines.append("" if foreign else blank if _MAGIC.search(line) else line)
            places.append(Place(at, number))
    return lines, places


def modified(paths: Sequence[str]) -> dict[str, int]:
    """Return the files below some paths with the times of their last change, in nanoseconds."""
    found = {}
    for path in find([each for each in paths if os.path.exists(each)]):
        try:
            found[path] = os.stat(path).st_mtime_ns
        except OSError:
            continue
    return found
