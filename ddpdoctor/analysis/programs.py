"""The user's files that a run consists of, as far as it has shown them."""

from __future__ import annotations

import ast
import functools
import itertools
import os

from ddpdoctor.core import opening
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import SiteRecord
from ddpdoctor.run.snapshot import Run

MOST_FILES = 64
"""Files of the user's that are read."""


def files_of(run: Run) -> list[str]:
    """The files of the user's that are known to have run, and what they import beside them."""
    found: dict[str, None] = {}
    for rank in run.last:
        for record in (*rank.records.of(SiteRecord), *rank.records.of(DdpRecord)):
            if record.path:
                found[record.path] = None
    # The dictionary grows: an imported file may import others.
    queue = list(found)
    for path in queue:
        for each in imported(path, changed(path)):
            if each not in found and len(found) < MOST_FILES:
                found[each] = None
                queue.append(each)
    return list(found)


def changed(path: str) -> int:
    """When a file was changed; 0 if it cannot be read, or is too large."""
    try:
        stat = opening.facts(path)
    except OSError:
        return 0
    return stat.st_mtime_ns if stat.st_size <= opening.MOST_PARSED else 0


@functools.lru_cache(maxsize=MOST_FILES)
def tree_of(path: str, when: int) -> ast.Module | None:
    """A file, parsed; None if it cannot be."""
    try:
        return ast.parse(opening.contents(path, opening.MOST_PARSED, links=True)) if when else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


@functools.lru_cache(maxsize=MOST_FILES)
def imported(path: str, when: int) -> tuple[str, ...]:
    """The files that a file imports, as far as they lie beside it, beside its package, or below."""
    tree = tree_of(path, when)
    names: list[str] = []
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{each.name}".lstrip(".") for each in node.names)]
    here = os.path.dirname(path)
    bases = [
        os.path.join(folder, *name.split("."))
        for name in dict.fromkeys(filter(None, names))
        for folder in (here, os.path.dirname(here))
    ]
    files = (file for base in bases for file in (f"{base}.py", f"{base}/__init__.py"))
    return tuple(itertools.islice(filter(changed, files), MOST_FILES))
