"""A pytest plugin for ``tools.mutants``: which lines of the rules each test runs.

``REACHED_INTO`` names a file that gets, for each module, the tests that run each of its lines; the
name of what runs on import is empty. ``REACHED_ONLY`` names a file with the tests to run, one a
line, in this order. Lines that run in other processes are not seen.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("ddpdoctor/diagnose",)

INTO, ONLY = (os.environ.get(name, "") for name in ("REACHED_INTO", "REACHED_ONLY"))

_tests: dict[tuple[str, int], list[str]] = defaultdict(list)


def _watch(lines: set[tuple[str, int]]) -> None:
    """Note the lines that run from now on."""
    folders = tuple(str(ROOT / folder) for folder in FOLDERS)

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(folders) else None

    sys.settrace(call)
    threading.settrace(call)


def _seen(name: str, lines: set[tuple[str, int]]) -> None:
    """Leave off, and keep what was noted."""
    sys.settrace(None)
    threading.settrace(None)
    for each in lines:
        _tests[each].append(name)


def _forget() -> None:
    """Empty the caches of the watched modules: what is remembered runs no line."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ddpdoctor.diagnose."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


_imported: set[tuple[str, int]] = set()
if INTO:
    _watch(_imported)


def pytest_collection_finish() -> None:
    """Keep what ran on import."""
    _seen("", _imported)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note the lines that the test and its fixtures run."""
    if not INTO:
        return (yield)
    lines: set[tuple[str, int]] = set()
    _forget()
    _watch(lines)
    try:
        return (yield)
    finally:
        _seen(item.nodeid, lines)


def pytest_sessionfinish() -> None:
    """Write what was seen."""
    if INTO:
        found: dict[str, dict[int, list[str]]] = defaultdict(dict)
        for (path, line), tests in _tests.items():
            found[str(Path(path).relative_to(ROOT))][line] = tests
        Path(INTO).write_text(json.dumps(found))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that are asked for, in the order in which they are."""
    if ONLY:
        places = {name: place for place, name in enumerate(Path(ONLY).read_text().splitlines())}
        chosen = [item for item in items if item.nodeid in places]
        items[:] = sorted(chosen, key=lambda item: places[item.nodeid])
