"""Code that DataLoader workers run: no debugger is in them, so a breakpoint there is not hit.

debugpy answers such a breakpoint as verified, since the file and the line are right.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from ddpdoctor.core.user_code import user_file
from ddpdoctor.probe.runtime import torch_loaders

_ENTRIES = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")
"""The methods of a data set, and of a transform, that workers call by themselves."""

_MOST_PARTS = 64
_MOST_ITEMS = 64
"""A longer list holds data, not data sets or transforms."""

_in_workers: set[CodeType] = set()
_here: set[CodeType] = set()
"""What this process runs itself, for a loader without workers."""

fresh: list[Callable[[], None]] = []
"""Called when code has become known that workers run."""


def note(iterator: Any) -> None:
    """Take in whose code a loader's iterator runs; called once per pass over the data."""
    known = _in_workers if torch_loaders.workers_of(iterator) else _here
    found = set(_codes(iterator)) - known
    if found:
        known |= found
        if known is _in_workers:
            for listener in fresh:
                listener()


def lines_in_workers(path: str, lines: Iterable[int]) -> list[int]:
    """Those of ``lines`` of a file that only workers run."""
    file = os.path.realpath(path)
    spans = [
        _span(code) for code in _in_workers - _here if os.path.realpath(code.co_filename) == file
    ]
    return [line for line in lines if any(first <= line <= last for first, last in spans)]


def _codes(iterator: Any) -> Iterator[CodeType]:
    roots = [torch_loaders.dataset_of(iterator), *torch_loaders.worker_functions_of(iterator)]
    for part in _parts(roots):
        function = _function(part)
        if function is None:
            yield from _methods(type(part))
        elif user_file(function.co_filename):
            yield function


def _parts(roots: list[Any]) -> list[Any]:
    """What workers call: ``roots``, and what hangs on these, such as wrapped data sets, transforms.

    Attributes are read as they lie there, so that no code of the user runs.
    """
    found: list[Any] = []
    waiting, seen = list(roots), set[int]()
    while waiting and len(found) < _MOST_PARTS:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, (list, tuple, dict)):
            if len(part) <= _MOST_ITEMS:
                waiting += part.values() if isinstance(part, dict) else part
        elif isinstance(part, partial):
            waiting.append(part.func)
        elif _function(part) is not None:
            found.append(part)
        elif any(_function(_members(type(part)).get(name)) for name in _ENTRIES):
            found.append(part)
            with contextlib.suppress(AttributeError):
                waiting += object.__getattribute__(part, "__dict__").values()
    return found


def _methods(kind: type) -> Iterator[CodeType]:
    """The methods of a class that workers enter at, and those that no other method calls."""
    members = {
        name: code
        for name, member in _members(kind).items()
        if (code := _function(member)) is not None and user_file(code.co_filename)
    }
    entries = members.keys() & set(_ENTRIES)
    inside = _called(members, entries)
    outside = _called(members, members.keys() - inside)
    for name in entries | (inside - outside):
        yield members[name]


def _called(members: dict[str, CodeType], names: Iterable[str]) -> set[str]:
    """These methods of a class, and the methods of it that these call."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _names(members[name]) & members.keys()
    return found


def _names(code: CodeType) -> set[str]:
    """The attributes and globals that a function names, functions within it included."""
    found = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= _names(each)
    return found


def _members(kind: type) -> dict[str, Any]:
    return {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}


def _function(member: Any) -> CodeType | None:
    """The code of a function, a method or a property; None for anything else."""
    if isinstance(member, (MethodType, staticmethod, classmethod)):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    if not isinstance(member, FunctionType):
        return None
    # Behind its decorators, such as torch.no_grad().
    inner = inspect.unwrap(member)
    return inner.__code__ if isinstance(inner, FunctionType) else member.__code__


def _span(code: CodeType) -> tuple[int, int]:
    """The first line of a function's body and its last one, functions within it included."""
    last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
    inner = [_span(each)[1] for each in code.co_consts if isinstance(each, CodeType)]
    # The line of `def` itself is run where the module is imported.
    return code.co_firstlineno + 1, max([last, *inner])
