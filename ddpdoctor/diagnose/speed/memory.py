"""Find evidence of growing memory: its rate, the time until memory is full, and the holder.

The user's source shows the line at which an object grows, and whether something bounds it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from ddpdoctor.core.syntax import FUNCTIONS, LOOPS, last_name
from ddpdoctor.core.user_code import Location, user_file
from ddpdoctor.diagnose.source_files import files_of, nodes_of, per_file, tree_of
from ddpdoctor.run.memory_growth import EARLY_SEGMENTS, Growth, steady_growth
from ddpdoctor.run.records.memory import (
    Allocated,
    DatasetRecord,
    Holder,
    HoldersRecord,
    MemoryPoint,
    MemoryRecord,
    WorkerMemory,
)
from ddpdoctor.run.records.training import LoopRecord, PassRecord
from ddpdoctor.run.snapshot import Rank, Run

# -- the line at which an object grows

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


# -- the memory of a rank

MIN_GROWTH = 32 << 20  # Minimum growth of a rank in bytes
MIN_UNEXPLAINED = 192 << 20  # The same without a known holder
MIN_UNEXPLAINED_SHARE = 0.25  # And the minimum relative to the memory before
MIN_LOOKS = 3  # Minimum number of consecutive samples in which an object grows
MIN_SHARE = 0.2  # Minimum fraction of the growth that an object explains
MIN_WORKER = 48 << 20  # Minimum growth of a worker process in bytes
MIN_COPIES = 4  # Minimum number of samples that show copied pages
NEW_SHARE = 0.25  # Maximum growth of its memory in the same time, relative to the copies
HEAVIER = 1.25  # Minimum factor of CPU time or samples per step if batches get larger


def points_of(rank: Rank) -> tuple[MemoryPoint, ...]:
    """Return the readings of a rank's memory, oldest first."""
    return tuple(each for record in rank.records.of(MemoryRecord) for each in record.points)


class Grows(NamedTuple):
    """A rank whose memory grows steadily."""

    rank: Rank
    growth: Growth
    gpu: bool  # Whether it is GPU memory, not host memory


def growing(rank: Rank, least: int = MIN_GROWTH, segments: int | None = None) -> Grows | None:
    """Return the steady growth of a rank's memory. None if there is none."""
    points = points_of(rank)
    given = [(each.step, each.allocated) for each in points if each.allocated is not None]
    of_host = [(each.step, each.host) for each in points]
    for gpu, values in ((True, given), (False, of_host)):
        found = (
            steady_growth(values, least)
            if segments is None
            else steady_growth(values, least, segments)
        )
        if found is not None:
            return Grows(rank, found, gpu)
    return None


# -- the object that holds it


class Held(NamedTuple):
    """An object that holds the memory a rank gains."""

    holder: Holder
    line: Location | None
    rate: float | None  # Bytes that it gains per step. None if unknown.
    bounded: bool


def held_by(run: Run, found: Grows, fewest: int = MIN_LOOKS) -> Held | None:
    """Return the object that holds most of a rank's new memory. None if not found."""
    records = [each for each in found.rank.records.of(HoldersRecord) if each.looks >= fewest]
    candidates = [held for record in reversed(records) for held in _plausible(run, found, record)]
    return max(candidates, key=_weight, default=None)


def allocated_by(found: Grows) -> Allocated | None:
    """Return the line that allocates most of a rank's new GPU memory. None if unknown."""
    sites = [each for record in found.rank.records.of(HoldersRecord) for each in record.allocated]
    site = max(sites, key=lambda each: each.size, default=None)
    if site is None or site.size < MIN_SHARE * found.growth.per_step * site.steps:
        return None
    return site


def looked(rank: Rank, fewest: int) -> bool:
    """Return whether a rank has searched for holders of its memory at least this often."""
    return any(each.looks >= fewest for each in rank.records.of(HoldersRecord))


def _weight(held: Held) -> tuple[bool, bool, float]:
    hooks, graph = held.holder.sort == "hooks", held.holder.graph
    return hooks, graph and not held.bounded, float("inf") if held.rate is None else held.rate


def _plausible(run: Run, found: Grows, record: HoldersRecord) -> Iterator[Held]:
    steps = max(record.step - record.first, 1)
    for holder in record.found:
        rate = None if holder.each is None else holder.grew * holder.each / steps
        if rate is not None and rate < MIN_SHARE * found.growth.per_step:
            continue
        at = holder.at
        files = [each for each in files_of(run) if user_file(each)]
        source = source_of(files, at.path, at.function, holder.name, holder.sort)
        full = source.per_item and not _passed(found)
        # An object that keeps graphs is a fault even if it is re-created after thousands of steps.
        again = source.bounded and not holder.graph
        yield Held(holder, source.line, rate, holder.bound is not None or again or full)


def _passed(found: Grows) -> bool:
    """Return whether a pass over the data ended before memory began to grow."""
    loops = found.rank.records.of(LoopRecord)
    return any(each.state == "ended" and each.step <= found.growth.start for each in loops)


def heavier(run: Run, found: Grows) -> bool:
    """Return whether batches get larger: steps take more samples, or more CPU time."""
    span = range(found.growth.start, found.growth.end + 1)
    steps = [each for each in found.rank.steps if each.step in span and run.undisturbed(each)]
    third = len(steps) // 3
    if third < 2:
        return False
    early, late = (
        median(each.cpu if each.cpu is not None else each.own for each in part)
        for part in (steps[:third], steps[-third:])
    )
    samples = [each.samples for each in steps if each.samples]
    more = bool(samples) and samples[-1] > samples[0] * HEAVIER
    return more or late > HEAVIER * early


def _beyond_pass(rank: Rank, growth: Growth) -> bool:
    """Return whether growth over time lasts longer than a pass, which may fill a cache."""
    loops = rank.records.of(LoopRecord)
    ended = any(each.state == "ended" and each.time // 1_000_000 <= growth.start for each in loops)
    return ended or any(each.iterable for each in rank.records.of(PassRecord))


# -- the time until memory is full


def steps_left(run: Run, found: Grows, together: Sequence[Grows]) -> int | None:
    """Return the number of steps until memory is full, if the ranks ``together`` keep growing."""
    records = found.rank.records.of(MemoryRecord)
    newest = records[-1] if records else None
    if newest is None:
        return None
    beside = [each for each in together if each.gpu == found.gpu and _shares(each, found)]
    rate = sum(each.growth.per_step for each in beside)
    if found.gpu:
        used = [each.reserved or 0 for one in beside for each in points_of(one.rank)[-1:]]
        free = None if newest.total is None else newest.total - sum(used)
    else:
        free = newest.available
    return None if free is None or rate <= 0 else max(int(free / rate), 0)


def _shares(one: Grows, other: Grows) -> bool:
    """Return whether two ranks fill the same memory."""
    if not one.gpu:
        return one.rank.opened.host == other.rank.opened.host
    mine, theirs = one.rank.status, other.rank.status
    same = mine is not None and theirs is not None and bool(mine.gpu) and mine.gpu == theirs.gpu
    return same or one.rank is other.rank


# -- workers of loaders


class WorkerGrows(NamedTuple):
    """A rank with a worker process whose memory grows steadily."""

    rank: Rank
    growth: Growth  # Its steps are milliseconds
    children: int
    copies: bool  # Whether it copies pages of the data set that it shared with the rank
    dataset: DatasetRecord | None


def _copied(readings: Sequence[tuple[int, WorkerMemory]]) -> Growth | None:
    """Return the pages that a worker copied while its memory did not grow.

    Fewer and fewer pages are left to copy, so this growth slows down from the start.
    """
    own = [(time, each.private) for time, each in readings if each.private is not None]
    if len(own) < MIN_COPIES:
        return None
    (start, low), (end, high) = own[0], own[-1]
    copied, grown = high - low, readings[-1][1].own - readings[0][1].own
    largest = max(after - before for (_, before), (_, after) in pairwise(own))
    if copied < MIN_WORKER or grown > NEW_SHARE * copied or largest > copied / 2:
        return None
    return Growth(start, end, low, high, copied / max(end - start, 1))


def _working(
    rank: Rank, readings: Sequence[tuple[int, WorkerMemory]]
) -> Sequence[tuple[int, WorkerMemory]]:
    """Leave out readings of a worker that imports modules, before the first batch of its pass."""
    born = readings[0][0]
    loops = [(each.time // 1_000_000, each.state) for each in rank.records.of(LoopRecord)]
    before = [state for time, state in loops if time < born]
    if not before or before[-1] != "ended":
        return readings
    begun = min((time for time, _ in loops if time >= born), default=readings[-1][0] + 1)
    return [each for each in readings if each[0] >= begun]


def growing_worker(rank: Rank) -> WorkerGrows | None:
    """Return the growth of a rank's worker process. None if there is none."""
    readings = [
        (each.time // 1_000_000, each.worker)
        for each in rank.records.of(MemoryRecord)
        if each.worker is not None
    ]
    if not readings:
        return None
    newest = readings[-1][1]
    mine = _working(rank, [each for each in readings if each[1].pid == newest.pid])
    datasets = rank.records.of(DatasetRecord)
    whole = [(time, worker.own) for time, worker in mine[1:]]
    grown = steady_growth(whole, MIN_WORKER, EARLY_SEGMENTS, warm_up=0)
    copied = _copied(mine[1:])
    if grown is not None and _beyond_pass(rank, grown):
        return WorkerGrows(rank, grown, newest.children, False, None)
    if copied is None or not datasets:
        return None
    largest = max(datasets, key=lambda each: each.size)
    return WorkerGrows(rank, copied, newest.children, True, largest)
