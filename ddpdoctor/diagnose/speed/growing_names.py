"""Find the line at which an object grows in the user's source, and whether something bounds it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddpdoctor.core.syntax import FUNCTIONS, LOOPS, last_name
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.source_files import nodes_of, per_file, tree_of

_GROWS = ("append", "appendleft", "add", "extend", "insert", "setdefault", "update", "put")
_SHRINKS = ("pop", "popleft", "popitem", "clear", "remove", "discard", "get_nowait")
_HEAP = ("heappop", "heapreplace", "heappushpop")
_BUILDS = ("__init__", "__post_init__", "setup", "build", "configure", "<module>")
_ITEMS = ("__getitem__", "__getitems__", "__iter__")
MAX_WORDS = 3  # Number of last words of a dotted name to search for in the source
_HOOK = re.compile(r"register_\w*hook$")


class Change(NamedTuple):
    """A statement that changes the length of an object."""

    name: str
    line: int
    function: str  # Empty at module level
    loops: tuple[int, ...]  # Lines of the loops around it in its function, outermost first


class Changes(NamedTuple):
    """The changing statements of a file, by effect."""

    grows: tuple[Change, ...]
    shrinks: tuple[Change, ...]  # Also length checks, and writes that overwrite old elements
    made: tuple[Change, ...]  # Statements that assign a new object
    hooks: tuple[Change, ...]
    called: frozenset[str]  # Functions that are called in a loop


class Source(NamedTuple):
    """A growing object in the user's source."""

    line: Location | None
    bounded: bool  # Whether it is truncated, cleared or re-created
    per_item: bool  # Whether it gains an entry for each sample of a data set


def source_of(files: Iterable[str], path: str, function: str, name: str, sort: str) -> Source:
    """Return the line at which an object of a frame's function grows, and whether it is bounded.

    ``sort`` is its kind (`ddpdoctor.run.records.memory.Holder`).
    """
    paths = list(dict.fromkeys((path, *files)))
    if sort == "hooks":
        return Source(_first(paths, path, function, None), False, False)
    words = re.findall(r"[A-Za-z_]\w*", name)[::-1]
    # The growing object may be an entry of the named one: ``values[key].append(value)``.
    lines = {word: _first(paths, path, function, word) for word in words[:MAX_WORDS]}
    word = next((word for word, line in lines.items() if line is not None), "")
    line = lines.get(word) or next(filter(None, (_made(each, words[:1]) for each in paths)), None)
    bounded, per_item = False, False
    for each in paths:
        changes = _changes(each)
        mine = [change for change in changes.grows if change.name == word]
        if mine:
            bounded = bounded or any(change.name == word for change in changes.shrinks)
        for growing in mine:
            per_item = per_item or growing.function in _ITEMS
            bounded = bounded or _made_again(changes, growing, "." in name)
    return Source(line, bounded, per_item)


def made_at(path: str, name: str) -> Location | None:
    """Return the first line of a file that assigns a new object to a name."""
    return _made(path, [name])


def kept_by_items(files: Iterable[str]) -> Location | None:
    """Return the only line at which a data set keeps data of each sample that it returns."""
    found = [
        Location(path, each.line)
        for path in files
        for each in _changes(path).grows
        if each.function in _ITEMS
        and not any((made.name, made.function) == each[::2] for made in _changes(path).made)
    ]
    return found[0] if len(found) == 1 else None


def _made(path: str, words: Sequence[str]) -> Location | None:
    """Return the line that defines the function or variable of that name."""
    for node in nodes_of(path):
        if isinstance(node, FUNCTIONS) and node.name in words:
            return Location(path, node.lineno)
    lines = (each.line for each in _changes(path).made if each.name in words)
    return next((Location(path, line) for line in lines), None)


def _made_again(changes: Changes, growing: Change, attribute: bool) -> bool:
    """Return whether the name gets a new object in each pass or call."""
    for made in changes.made:
        if made.name != growing.name or made.line == growing.line:
            continue
        same = made.function == growing.function
        if made.loops and (not same or growing.loops[: len(made.loops)] == made.loops):
            return True
        if attribute:
            if made.function not in _BUILDS and made.function:
                return True
        elif same and made.function in changes.called:
            return True
    return False


def _first(paths: list[str], path: str, function: str, word: str | None) -> Location | None:
    """Return the line closest to the frame that makes an object grow, or adds a hook."""
    found: list[tuple[bool, bool, bool, Location]] = []
    for each in paths:
        changes = _changes(each)
        chosen = changes.hooks if word is None else changes.grows
        for change in chosen:
            if word is None or change.name == word:
                inside = bool(change.loops) or change.function in changes.called
                near = change.function == function and each == path
                found.append((not near, not inside, each != path, Location(each, change.line)))
    return min(found)[-1] if found else None


class _Reader:
    """Reads a file once, with the function and the loops around each statement."""

    def __init__(self) -> None:
        self.grows: list[Change] = []
        self.shrinks: list[Change] = []
        self.made: list[Change] = []
        self.hooks: list[Change] = []
        self.called: set[str] = set()
        self._circles: set[str] = set()  # Names of indices that wrap around
        self._stored: list[tuple[Change, ast.expr]] = []  # Assigned elements, with their indices

    def read(self, node: ast.AST, function: str = "", loops: tuple[int, ...] = ()) -> None:
        """Read a statement or expression, and everything in it."""
        if isinstance(node, FUNCTIONS):
            function, loops = node.name, ()
        elif isinstance(node, LOOPS):
            loops = (*loops, node.lineno)
        self._take(node, Change("", getattr(node, "lineno", 0), function, loops))
        for child in ast.iter_child_nodes(node):
            self.read(child, function, loops)

    def finish(self) -> None:
        """Distinguish elements that overwrite older ones from those that are added."""
        for change, index in self._stored:
            inside = list(ast.walk(index))
            circles = any(isinstance(each, ast.Mod) for each in inside)
            circles = circles or any(_name(each) in self._circles for each in inside)
            (self.shrinks if circles else self.grows).append(change)

    def _take(self, node: ast.AST, at: Change) -> None:
        if isinstance(node, ast.Call):
            self._take_call(node, at)
        elif isinstance(node, ast.Compare):
            self.shrinks += [
                at._replace(name=_name(each.args[0]))
                for each in (node.left, *node.comparators)
                if isinstance(each, ast.Call) and _name(each.func) == "len" and each.args
            ]
        elif isinstance(node, ast.Delete):
            cut = (each for each in node.targets if isinstance(each, ast.Subscript))
            self.shrinks += [at._replace(name=_name(each)) for each in cut]
        elif isinstance(node, ast.AugAssign):
            self.grows.append(at._replace(name=_name(node.target)))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._take_assignment(target, node.value, at)

    def _take_call(self, node: ast.Call, at: Change) -> None:
        called = _name(node.func)
        if at.loops:
            self.called.add(called)
        if _HOOK.match(called):
            self.hooks.append(at)
        if called in _HEAP and node.args:
            self.shrinks.append(at._replace(name=_name(node.args[0])))
        if isinstance(node.func, ast.Attribute):
            change = at._replace(name=_name(node.func.value))
            if called in _GROWS:
                self.grows.append(change)
            elif called in _SHRINKS:
                self.shrinks.append(change)

    def _take_assignment(self, target: ast.expr, value: ast.expr, at: Change) -> None:
        change = at._replace(name=_name(target))
        inside = list(ast.walk(value))
        if isinstance(target, ast.Subscript) and _name(target) == _name(target.value):
            if isinstance(target.slice, ast.Slice):
                self.shrinks.append(change)
            else:
                self._stored.append((change, target.slice))
            return
        if any(isinstance(each, ast.Mod) for each in inside):
            self._circles.add(change.name)
        cut = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice)
        if not any(_name(each) == change.name for each in inside if each is not value):
            self.made.append(change)
        elif cut:
            self.shrinks.append(change)
        else:
            self.grows.append(change)


@per_file
def _changes(path: str) -> Changes:
    """Return the statements of a file that change the length of an object."""
    reader, tree = _Reader(), tree_of(path)
    if tree is not None:
        reader.read(tree)
        reader.finish()
    return Changes(
        tuple(reader.grows),
        tuple(reader.shrinks),
        tuple(reader.made),
        tuple(reader.hooks),
        frozenset(reader.called),
    )


def _name(node: ast.AST) -> str:
    """Return the last name of an expression: ``c`` of ``a.b.c``, ``a["c"]`` and ``c[0]``."""
    if isinstance(node, ast.Subscript):
        index = node.slice
        if isinstance(index, ast.Constant) and isinstance(index.value, str):
            return index.value
        return _name(node.value)
    if isinstance(node, ast.Call) and last_name(node.func) in ("setdefault", "get"):
        return _name(getattr(node.func, "value", node.func))
    return last_name(node)
