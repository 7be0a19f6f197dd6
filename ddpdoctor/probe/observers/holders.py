"""Find the objects that grow on a rank, and the names that hold them.

A scan walks from the frames of the training thread and the user's modules through containers,
objects, closures and tensors, nearest first, and notes the size of each. A second scan some steps
later shows what grew. A scan takes a few milliseconds at most and keeps only names and numbers. It
calls no code of the job, changes no object, and uses neither the garbage collector nor a device.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import OrderedDict, deque
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

from ddpdoctor.core.user_code import user_file
from ddpdoctor.probe.runtime import torch_memory
from ddpdoctor.probe.runtime.evaluation import locals_of
from ddpdoctor.run.records.base import CodeFrame
from ddpdoctor.run.records.memory import Holder

MAX_SCAN_NS = 8_000_000  # maximum CPU time of a scan, in nanoseconds
MAX_DEPTH = 9  # maximum number of references from a frame or module to a noted object
MAX_FOLLOWED = 256  # maximum number of elements followed in a container, newest first
MAX_FRAMES = 64
MAX_MODULES = 128  # maximum number of the user's modules
MIN_ELEMENTS, MIN_BYTES = 2, 1 << 14  # minimum size of a noted object, in elements and in bytes
MAX_FOUND = 8  # maximum number of holders in a record
MAX_DESCRIBED = 64  # maximum number of objects weighed in one element
MIN_WEIGHT = 1 << 20  # minimum growth in bytes that is worth reporting
MAX_GRAPHS = 8  # maximum number of tensors whose graph is counted
_CHECKED_EVERY = 32  # number of objects between two readings of the clock
_OPTIMIZED = 1  # `inspect.CO_OPTIMIZED`, the flag of a function's code

_PLAIN = (int, float, bool, complex, type(None), type(...), slice, range, ModuleType, CodeType)
_PLAIN_TYPES = frozenset((*_PLAIN, BuiltinFunctionType, object, FrameType))
_TEXTS = (str, bytes, bytearray)
_EMPTY = (list, tuple, dict, OrderedDict, set, frozenset)
_SHORTEST: dict[type, int] = {**dict.fromkeys(_EMPTY, 1), **dict.fromkeys(_TEXTS, MIN_BYTES)}
"""Minimum length at which values of these classes are followed."""
_CLOSED = (
    *("logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "importlib"),
    *("ddpdoctor", "socket", "ctypes", "ast", "inspect", "typing", "enum", "re", "pathlib"),
)
"""Modules that refer to all other objects and hold nothing of the job."""
_CLOSED_TORCH = ("torch._dynamo", "torch._inductor", "torch.fx", "torch.distributed", "torch._C")
_FLAT = ("_modules", "_parameters", "_buffers")  # dictionaries of a module that read as attributes
_BOUNDS = ("maxlen", "maxsize", "max_size", "capacity", "buffer_size", "max_len", "limit")
_LRU = type(functools.lru_cache(maxsize=1)(lambda: None))
_MODULE = "<module>"


class Noted(NamedTuple):
    """The kind and size of an object."""

    sort: str
    size: int


class Place(NamedTuple):
    """A name in a frame or module. It is the same in each scan."""

    path: str
    line: int
    function: str
    name: str


class Scan:
    """One scan of what a rank holds, from the innermost relevant frame of the training thread.

    Only objects that have grown since the ``earlier`` scan are described.
    """

    def __init__(self, frame: FrameType | None, earlier: dict[Place, Noted] | None = None) -> None:
        self.sizes: dict[Place, Noted] = {}
        self.grown: dict[Place, Holder] = {}
        self.complete = True
        self._earlier = earlier
        # Parallel lists, since the garbage collector would track tuples.
        self._objects: list[Any] = []
        self._parents: list[int] = []
        self._labels: list[Any] = []
        self._seen: set[int] = {id(self), id(self.sizes), id(self.grown)}
        self._graphs = 0
        self._tensor: Any = getattr(sys.modules.get("torch"), "Tensor", ())
        self._until = 0
        self._depths: list[int] = []
        try:
            frames: list[FrameType] = []
            while frame is not None and len(frames) < MAX_FRAMES:
                if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _CLOSED:
                    frames.append(frame)
                frame = frame.f_back
            mine = [each for each in frames if user_file(each.f_code.co_filename)]
            self._frames(mine)
            self._modules(mine)
            self._until = time.thread_time_ns() + MAX_SCAN_NS
            self._walk()
            # Trainers of libraries lead to many objects that are not the job's.
            self._frames([each for each in frames if each not in mine])
            self._walk()
        finally:
            # This must not keep any object of the job alive.
            del self._objects, self._seen

    # -- where a scan begins

    def _frames(self, frames: list[FrameType]) -> None:
        for each in frames:
            code = each.f_code
            root = self._root(CodeFrame(code.co_filename, code.co_firstlineno, code.co_name))
            if code.co_flags & _OPTIMIZED:
                self._children(root, locals_of(each))
            elif id(each.f_globals) not in self._seen:
                self._seen.add(id(each.f_globals))
                self._children(root, each.f_globals)

    def _modules(self, frames: list[FrameType]) -> None:
        """Begin at the user's modules, running ones first.

        A package belongs as a whole to the user or to a library.
        """
        packages: dict[str, bool] = {}
        count = 0
        modules = sys.modules.copy()
        running = [str(each.f_globals.get("__name__")) for each in frames]
        for name in dict.fromkeys((*running, *modules)):
            package, module = name.partition(".")[0], modules.get(name)
            if packages.get(package) is False or type(module) is not ModuleType:
                continue
            path, names = _file_of(module), vars(module)
            if path and package not in packages:
                packages[package] = user_file(path)
            if path and packages[package] and id(names) not in self._seen and count < MAX_MODULES:
                count += 1
                self._seen.add(id(names))
                self._children(self._root(CodeFrame(path, 0, _MODULE)), names)

    def _root(self, at: CodeFrame) -> int:
        self._objects.append(None)
        self._parents.append(-1)
        self._labels.append(at)
        return len(self._labels) - 1

    def _children(self, parent: int, named: dict[Any, Any]) -> None:
        for name, value in list(named.items()):
            if type(name) is str and name[:2] != "__":
                self._add(parent, name, value)

    def _add(self, parent: int, label: Any, value: Any) -> None:
        kind = type(value)
        # A module has a dozen empty dictionaries. Skip short containers, which lead nowhere.
        least = _SHORTEST.get(kind)
        if kind not in _PLAIN_TYPES and (least is None or len(value) >= least):
            self._objects.append(value)
            self._parents.append(parent)
            self._labels.append(label)

    # -- what a scan walks through

    def _walk(self) -> None:
        depths = self._depths
        at = len(depths)
        while at < len(self._objects):
            if not at % _CHECKED_EVERY and time.thread_time_ns() > self._until:
                self.complete = False
                break
            parent, value = self._parents[at], self._objects[at]
            depth = depths[parent] + 1 if parent >= 0 else 0
            depths.append(depth)
            if value is not None and id(value) not in self._seen:
                self._seen.add(id(value))
                self._visit(at, value, depth < MAX_DEPTH)
            at += 1

    def _visit(self, at: int, value: Any, deeper: bool) -> None:
        kind = type(value)
        if issubclass(kind, (list, tuple, dict, set, frozenset, deque)):
            self._container(at, value, kind, deeper)
        elif issubclass(kind, _TEXTS):
            if len(value) >= MIN_BYTES:
                self._note(at, "text", len(value), value)
        elif self._tensor and issubclass(kind, self._tensor):
            self._of_tensor(at, value)
        elif torch_memory.is_array(kind):
            self._note(at, "array", int(value.nbytes), value)
        elif kind is _LRU:
            facts = _LRU.cache_info(value)
            if facts.maxsize is None:
                self._note(at, "cache", facts.currsize, value)
        elif deeper:
            self._open(at, value, kind)

    def _container(self, at: int, value: Any, kind: type, deeper: bool) -> None:
        size = _length(value)
        # A class creates its tuples once. Other tuples are replaced by longer ones.
        if size >= MIN_ELEMENTS:
            hooks = isinstance(self._labels[at], str) and self._labels[at].endswith("_hooks")
            self._note(at, "hooks" if hooks else _base_of(kind).__name__, size, value)
        if not deeper or not size:
            return
        if issubclass(kind, dict):
            pairs = dict.items(value)
            chosen = list(pairs) if size <= MAX_FOLLOWED else [next(iter(reversed(pairs)))]
            for key, each in chosen:
                self._add(at, _label(key), each)
        elif issubclass(kind, (set, frozenset)):
            if size <= MAX_FOLLOWED:
                for each in tuple(value) if kind in (set, frozenset) else ():
                    self._add(at, "[]", each)
        else:
            base = _base_of(kind)
            if size <= MAX_FOLLOWED:
                for number, each in enumerate(list(base.__iter__(value))):
                    self._add(at, number, each)
            else:
                self._add(at, -1, base.__getitem__(value, -1))
        if kind not in (list, tuple, dict, set, frozenset, deque):
            self._attributes(at, value, kind)

    def _of_tensor(self, at: int, value: Any) -> None:
        size = torch_memory.storage_bytes(value)
        if size is not None and size >= MIN_BYTES:
            self._note(at, "tensor", size, value)
        for name, hooks in torch_memory.hooks_of(value):
            self._add(at, name, hooks)
        if self._graphs < MAX_GRAPHS and torch_memory.has_graph(value):
            self._graphs += 1
            links = torch_memory.links_of(value)
            if links >= MIN_ELEMENTS:
                self._note(at, "graph", links, value)

    def _open(self, at: int, value: Any, kind: type) -> None:
        if kind is FunctionType:
            if user_file(value.__code__.co_filename):
                self._function(at, value)
        elif kind is MethodType:
            self._add(at, "__self__", value.__self__)
        elif kind is functools.partial:
            for name, each in (("func", value.func), ("args", value.args), ("kw", value.keywords)):
                self._add(at, name, each)
        elif issubclass(kind, type):
            path = _file_of(sys.modules.get(type.__getattribute__(value, "__module__")))
            if path and user_file(path):
                self._children(at, dict(type.__dict__["__dict__"].__get__(value)))
        else:
            module = str(getattr(kind, "__module__", ""))
            if module.partition(".")[0] not in _CLOSED and not module.startswith(_CLOSED_TORCH):
                self._attributes(at, value, kind)

    def _function(self, at: int, value: FunctionType) -> None:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                self._add(at, name, cell.cell_contents)
            except ValueError:
                # The cell is still empty.
                continue
        code = value.__code__
        defaults = value.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
        for name, each in (*zip(names, defaults, strict=False), *vars(value).items()):
            self._add(at, name, each)
        for name, each in (value.__kwdefaults__ or {}).items():
            self._add(at, name, each)

    def _attributes(self, at: int, value: Any, kind: type) -> None:
        found = dict_of(value)
        for name, each in list(found.items()) if found is not None else ():
            if name in _FLAT and type(each) is dict:
                self._children(at, each)
            elif type(name) is str:
                self._add(at, name, each)
        for base in kind.__mro__ if found is None else ():
            for name, slot in list(vars(base).items()):
                if type(slot) is MemberDescriptorType:
                    try:
                        self._add(at, name, slot.__get__(value))
                    except AttributeError:
                        continue

    # -- what a scan notes

    def _note(self, at: int, sort: str, size: int, value: Any) -> None:
        place = self._place(at)
        if place is None:
            return
        noted = self.sizes.get(place)
        if noted is not None and noted.size >= size:
            return
        self.sizes[place] = Noted(sort, size)
        before = None if self._earlier is None else self._earlier.get(place)
        if before is None or before.sort != sort or before.size >= size:
            return
        holds, each, graph = _element(value, sort)
        self.grown[place] = Holder(
            name=place.name,
            sort=sort,
            at=CodeFrame(place.path, place.line, place.function),
            size=size,
            grew=size - before.size,
            holds=holds,
            each=each,
            graph=graph,
            bound=self._bound(at, value),
        )

    def _place(self, at: int) -> Place | None:
        """Return the frame or module that holds an object, and its dotted name."""
        words: list[str] = []
        while at >= 0 and self._parents[at] >= 0:
            label = self._labels[at]
            text = str(label) if isinstance(label, str) else f"[{label}]"
            words.append(text if text[0] == "[" else f".{text}")
            at = self._parents[at]
        if at < 0 or not words:
            return None
        root = self._labels[at]
        name = "".join(reversed(words)).removeprefix(".")
        return Place(root.path, root.line, root.function, name)

    def _bound(self, at: int, value: Any) -> int | None:
        """Return the maximum number of elements of a container, or of the object that has it."""
        if isinstance(value, deque) and value.maxlen is not None:
            return value.maxlen
        holders = [value, self._objects[self._parents[at]]]
        for each in holders:
            known = dict_of(each) if type(each) not in _PLAIN_TYPES else None
            for name in _BOUNDS if known else ():
                for spelt in (name, f"_{name}"):
                    found = known.get(spelt) if known else None
                    if type(found) is int and found > 0:
                        return found
        return None


def _label(key: Any) -> str:
    """Return the part of a dotted name for a dictionary key."""
    if type(key) is str and key.isidentifier():
        return key
    return f"[{key!r}]" if type(key) is int or (type(key) is str and len(key) < 40) else "[]"


def _file_of(module: Any) -> str:
    path = vars(module).get("__file__") if type(module) is ModuleType else None
    return path if type(path) is str else ""


def dict_of(value: Any) -> dict[Any, Any] | None:
    """Return an object's dictionary without calling its code."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if type(found) is dict else None


def _base_of(kind: type) -> Any:
    """Return the built-in class of a container, whose methods run no code of the job."""
    bases = (list, tuple, dict, deque, set, frozenset)
    return next(each for each in bases if issubclass(kind, each))


def _length(value: Any) -> int:
    return int(_base_of(type(value)).__len__(value))


# -- the contents of a container


def _newest(value: Any) -> Any:
    base = _base_of(type(value))
    if not _length(value):
        return None
    if base is dict:
        return next(iter(reversed(dict.values(value))))
    return next(base.__iter__(value)) if base in (set, frozenset) else base.__getitem__(value, -1)


def _element(value: Any, sort: str) -> tuple[str, int | None, bool]:
    """Return the class of the newest element, its bytes if known, and whether it has a graph."""
    if sort in ("tensor", "array", "text"):
        return type(value).__name__, 1, False
    if sort in ("graph", "cache"):
        return type(value).__name__, None, sort == "graph"
    newest = _newest(value)
    return (type(newest).__name__, *_weigh(newest))


def _weigh(value: Any) -> tuple[int | None, bool]:
    """Return the bytes of an object and of all that only it refers to, and whether it has a graph.

    The bytes are None if unknown: for a graph, an object without a dictionary, or many objects.
    """
    total, known, graph = 0, True, False
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        if len(seen) >= MAX_DESCRIBED:
            known = False
            break
        seen.add(id(each))
        kind = type(each)
        tensor = torch_memory.storage_bytes(each)
        if tensor is not None:
            total += tensor
            graph = graph or torch_memory.has_graph(each)
        elif torch_memory.is_array(kind):
            total += int(each.nbytes)
        elif kind in (list, tuple, dict, set, deque):
            total += sys.getsizeof(each)
            parts = list(each.values()) if kind is dict else list(each)
            waiting += parts[:MAX_DESCRIBED]
        elif kind is FunctionType:
            total += 200
            waiting += _cells(each)
        elif kind in _PLAIN_TYPES or issubclass(kind, _TEXTS) or issubclass(kind, type):
            total += sys.getsizeof(each) if kind in (*_PLAIN[:5], *_TEXTS) else 0
        else:
            inside = dict_of(each)
            known = known and inside is not None
            total += 64
            waiting += list((inside or {}).values())[:MAX_DESCRIBED]
    return (total if known and not graph else None), graph


def _cells(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            continue
    return [*found, *(function.__defaults__ or ())]


def worth(value: Any) -> tuple[int, int | None]:
    """Return the length of a container of Python objects, and the bytes of one element."""
    if type(value) not in (list, tuple, dict):
        return 0, None
    size = _length(value)
    each, _ = _weigh(_newest(value)) if size else (None, False)
    return size, each


def words_of(container: Any) -> str:
    """Describe a container by its class and that of its elements: ``list of str``."""
    return f"{type(container).__name__} of {type(_newest(container)).__name__}"


def merged(before: dict[Place, Holder], scan: Scan) -> dict[Place, Holder]:
    """Return the holders that grew over several scans. ``scan`` is the newest."""
    kept: dict[Place, Holder] = {}
    for place, older in before.items():
        noted = scan.sizes.get(place)
        # A container that shrinks is bounded, or is rebuilt in each pass.
        if noted is not None and noted.size >= older.size:
            newest = scan.grown.get(place, older)
            kept[place] = newest._replace(grew=newest.size - older.size + older.grew)
    for place, holder in scan.grown.items():
        kept.setdefault(place, holder)
    return kept


def weighs(holder: Holder) -> bool:
    """Return whether the growth may be large."""
    return holder.graph or holder.each is None or holder.grew * holder.each >= MIN_WEIGHT


def weightiest(found: dict[Place, Holder]) -> tuple[Holder, ...]:
    """Return the holders with the most memory, for a record."""

    def weight(holder: Holder) -> tuple[bool, int]:
        return holder.graph or holder.each is None, holder.grew * (holder.each or 1)

    return tuple(sorted(found.values(), key=weight, reverse=True)[:MAX_FOUND])
