"""Find where the schedule of a learning rate leads, on a copy of its scheduler.

The scheduler of the job and its optimizer are not touched. A function of the job is called only if
its code changes nothing.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import itertools
import math
import sys
import time
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from ddpdoctor.probe.observers.optimizers import numbers_of

MAX_POSITIONS = 1_000_000  # simulated positions of a schedule
MAX_SECONDS = 8.0
UNKNOWN_LENGTH = 3000  # simulated positions of a schedule without a number
SAME = 1e-6  # relative difference of equal rates
MAX_DEPTH = 8  # functions that call each other
PLATEAU = "ReduceLROnPlateau"
"""Its rate may fall once its patience is over: what it follows is not known in advance."""

MEMBERS = "_schedulers"
"""The attribute of ``SequentialLR`` and ``ChainedScheduler`` that holds others (1.10 to 2.15)."""

_HARMLESS = frozenset(
    ("abs", "bool", "divmod", "enumerate", "float", "int", "isinstance", "len", "list", "max",
     "min", "pow", "range", "round", "sum", "super", "tuple", "zip")
)  # fmt: skip
"""Builtin functions that a schedule may call."""


class Course(NamedTuple):
    """Positions of a schedule. None if a position was not found."""

    start: int  # Its position now
    rate: float  # The highest
    peak: int  # The first with the highest rate
    half: int | None  # The first after it with at most half of that rate
    end: int | None  # The first after it with the lowest rate, unless the rate falls for ever


def outermost(known: list[Any]) -> list[Any]:
    """Return the schedulers that are not stepped by others, and those that step some."""
    members = {id(each) for each in known}
    outer = [
        each
        for each in gc.get_objects()
        if getattr(type(each), "__module__", "") == "torch.optim.lr_scheduler"
        and any(id(one) in members for one in vars(each).get(MEMBERS) or ())
    ]
    stepped = {id(one) for each in outer for one in _members(each)}
    return [each for each in (*known, *outer) if id(each) not in stepped]


def position_of(scheduler: Any) -> int | None:
    """Return the position of a scheduler in its schedule. None if it has none."""
    for each in (scheduler, *_members(scheduler)):
        if hasattr(each, "last_epoch"):
            return int(each.last_epoch)
    return None


def course_of(scheduler: Any) -> Course | None:
    """Return the course of the first parameter group's rate. None if it cannot be computed."""
    start = position_of(scheduler)
    if start is not None and type(scheduler).__name__ == PLATEAU:
        rate = float(scheduler.optimizer.param_groups[0]["lr"])
        return Course(start, rate, start, start + int(scheduler.patience) + 1, None)
    if start is None or not all(map(_is_pure, _functions(scheduler))):
        return None
    rates, refused = _simulated(scheduler)
    highest = max(rates)
    if len(rates) < 2 or highest <= 0:
        return None
    peak = next(at for at, rate in enumerate(rates) if rate >= (1 - SAME) * highest)
    later = range(peak, len(rates))
    half = next((at for at in later if 2 * rates[at] <= highest), None)
    lowest = min(rates[peak:]) + SAME * highest
    end = next(at for at in later if rates[at] <= lowest)
    falls = not refused and _falls(rates, end)
    return Course(
        start=start,
        rate=highest,
        peak=start + peak,
        half=None if half is None else start + half,
        end=None if falls else start + end,
    )


def _simulated(scheduler: Any) -> tuple[list[float], bool]:
    """Return the rates from now on, and whether the scheduler refused to go further."""
    copy, optimizer = _copied(scheduler)
    numbers = (each for one in (scheduler, *_members(scheduler)) for each in _numbers(one))
    limit = min(3 * max(numbers, default=0) or UNKNOWN_LENGTH, MAX_POSITIONS)
    rates = [float(optimizer.param_groups[0]["lr"])]
    until = time.monotonic() + MAX_SECONDS
    while len(rates) <= limit and time.monotonic() < until:
        try:
            copy.step()
            # A line may go on below zero.
            rates.append(max(0.0, float(optimizer.param_groups[0]["lr"])))
        except Exception:
            # OneCycleLR refuses to be stepped after its end.
            return rates, True
    return rates, False


def _falls(rates: list[float], end: int) -> bool:
    """Return whether rates seem to fall for ever, slowly or in steps."""
    if 3 * end > 2 * (len(rates) - 1):
        return True
    rest = rates[end:]
    return rest[-1] < rest[0] and all(one >= other for one, other in itertools.pairwise(rest))


def _numbers(scheduler: Any) -> Iterator[int]:
    """Yield numbers that may be a schedule's length."""
    yield from numbers_of(scheduler)
    yield from vars(scheduler).get("milestones") or ()


def _members(scheduler: Any) -> list[Any]:
    return list(vars(scheduler).get(MEMBERS) or ())


def _copied(scheduler: Any) -> tuple[Any, Any]:
    """Return a copy of a scheduler and of what it steps, with an optimizer of their own."""
    tensor, optimizer = sys.modules["torch"].Tensor, scheduler.optimizer
    groups = [
        {
            # Schedulers write into a tensor in place.
            name: float(value) if isinstance(value, tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]
    own = SimpleNamespace(param_groups=groups, defaults=dict(optimizer.defaults))

    def copied(each: Any) -> Any:
        copy = object.__new__(type(each))
        kept = {name: value for name, value in vars(each).items() if name != "step"}
        # In its first step a scheduler checks whether the optimizer was stepped.
        kept |= {"optimizer": own, "_step_count": 2}
        if "base_lrs" in kept:
            kept["base_lrs"] = [float(rate) for rate in kept["base_lrs"]]
        if MEMBERS in kept:
            kept[MEMBERS] = [copied(member) for member in kept[MEMBERS]]
        vars(copy).update(kept)
        return copy

    return copied(scheduler), own


def _functions(scheduler: Any) -> Iterator[Any]:
    """Yield functions of the job that a scheduler may call."""
    for each in (scheduler, *_members(scheduler)):
        for kind in type(each).__mro__:
            if kind.__module__ != "torch.optim.lr_scheduler" and kind is not object:
                yield from (one for one in vars(kind).values() if isinstance(one, FunctionType))
        for value in vars(each).values():
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if callable(one) and not isinstance(one, type):
                    yield one


def _is_pure(function: Any, depth: int = 0) -> bool:
    """Return whether a function surely changes nothing but its own names.

    Methods of a scheduler may change its copy.
    """
    if depth > MAX_DEPTH:
        return False
    if isinstance(function, functools.partial):
        return _is_pure(function.func, depth + 1)
    if isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, FunctionType):
        inner = vars(type(function)).get("__call__")
        if isinstance(inner, FunctionType):
            return _is_pure(inner, depth + 1)
        return getattr(function, "__module__", "") in ("math", "torch.optim.lr_scheduler")
    if function.__module__ == "torch.optim.lr_scheduler":
        return True
    cells = [_content(cell) for cell in function.__closure__ or ()]
    return _changes_nothing(function.__code__) and all(
        isinstance(value, type) or not callable(value) or _is_pure(value, depth + 1)
        for value in itertools.chain(cells, _used(function))
    )


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _used(function: FunctionType) -> Iterator[Any]:
    """Yield what a function reads by a global name."""
    for instruction in dis.get_instructions(function.__code__):
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        name = instruction.argval
        value = function.__globals__.get(name)
        if value is None and name not in _HARMLESS:
            value = getattr(builtins, name, None)
        if isinstance(value, ModuleType):
            # Any function of another module may draw or write.
            value = None if value in (math, sys.modules.get("numpy")) else print
        yield value


_WRITES = ("STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR", "DELETE_", "IMPORT_", "YIELD_")
_METHODS = frozenset(
    ("append", "add", "extend", "info", "item", "pop", "random", "update", "write")
)


def _changes_nothing(code: CodeType) -> bool:
    return (
        _METHODS.isdisjoint(code.co_names)
        and not any(each.opname.startswith(_WRITES) for each in dis.get_instructions(code))
        and all(_changes_nothing(each) for each in code.co_consts if isinstance(each, CodeType))
    )
