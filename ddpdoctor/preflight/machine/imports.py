"""What a script imports whenever it runs, and where Python would find it. Nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_SEARCHED = frozenset({"path", "modules", "meta_path", "path_hooks"})
"""Attributes of ``sys`` that decide what an import finds."""

_CHANGING = frozenset({"rootutils", "pyrootutils"})
"""Packages whose purpose is to change ``sys.path``."""

_LEVELS = 4
"""How many folders above the script are looked at for a module that is not found."""


@dataclass(frozen=True)
class Import:
    """A module that is imported whenever the script runs, by its first name."""

    module: str
    line: int


@dataclass(frozen=True)
class Imports:
    """The imports of a script that can be judged.

    Attributes:
        certain: Those that always run.
        cut: Whether more may follow: from where the script changes ``sys.path`` on, what is found
            is not known.
    """

    certain: tuple[Import, ...]
    cut: bool


def imports_of(tree: ast.Module, folder: Path) -> Imports:
    """The imports that a script does for certain, up to where it changes what is found.

    Args:
        tree: The script.
        folder: Where Python looks first, for modules of the script's own that change it.
    """
    found: list[Import] = []
    known: set[str] = set()
    for node in tree.body:
        new = list(_imported(node))
        found += new
        modules = {each.module for each in new} - known
        known |= modules
        if _changes_search(node) or any(_changes_when_imported(each, folder) for each in modules):
            return Imports(tuple(found), cut=True)
    return Imports(tuple(found), cut=False)


def exists(module: str, folder: Path) -> bool:
    """Whether Python would find a top-level module."""
    if module in sys.builtin_module_names or module in sys.stdlib_module_names:
        return True
    return _top(module, [str(folder)]) is not None


def nearby(module: str, folder: Path) -> Path | None:
    """The folder above the script, or the working one, that has a module Python does not find."""
    try:
        here = Path.cwd()
        above = [folder.resolve(), *folder.resolve().parents][:_LEVELS]
    except OSError:
        return None
    for root in (here, *above):
        for each in (root, root / "src"):
            if (each / f"{module}.py").is_file() or (each / module / "__init__.py").is_file():
                return each
    return None


def module_spec(name: str) -> ModuleSpec | None:
    """Where ``python -m name`` would find a module; None if nowhere. Its parents are not run."""
    first, *rest = name.split(".")
    # The working directory comes first for ``-m``.
    spec = _top(first, [""])
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its last name: for a dotted one the parent would have to be imported.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _top(module: str, folders: list[str]) -> ModuleSpec | None:
    try:
        spec = PathFinder.find_spec(module, [*folders, *sys.path])
        # An editable installation has a finder of its own.
        return spec or importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        # Loaded already in an odd way; a job may well import it.
        return ModuleSpec(module, None)


def _imported(node: ast.stmt) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name.partition(".")[0], node.lineno)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield Import(node.module.partition(".")[0], node.lineno)
    elif isinstance(node, (ast.With, ast.AsyncWith)) and not _suppresses(node):
        for each in node.body:
            yield from _imported(each)


def _suppresses(node: ast.With | ast.AsyncWith) -> bool:
    """Whether a ``with`` may be there to survive a missing module."""
    return any("suppress" in ast.dump(item.context_expr) for item in node.items)


def _changes_search(node: ast.stmt) -> bool:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            if each.value.id == "sys" and each.attr in _SEARCHED:
                return True
            if each.attr == "addsitedir":
                return True
        if isinstance(each, ast.ImportFrom) and each.module == "sys":
            changed = any(alias.name in _SEARCHED for alias in each.names)
            if changed:
                return True
    return False


def _changes_when_imported(module: str, folder: Path) -> bool:
    """Whether a module of the script's own, or one made for it, changes what is found next."""
    if module in _CHANGING:
        return True
    for path in (folder / f"{module}.py", folder / module / "__init__.py"):
        try:
            return b"sys.path" in path.read_bytes()
        except OSError:
            continue
    return False
