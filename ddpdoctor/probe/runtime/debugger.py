"""Run the debugger in a rank, from the first client on, silent while no client is attached.

debugpy is imported at the first client's request, on the control thread. It does not listen: each
session is a connection that the rank makes to the supervisor, which forwards the client's bytes.
A rank waits for a client at three places: before its first user line if asked to, at
``breakpoint()``, and after an uncaught exception if asked to.

DataLoader workers have no debugger, so a breakpoint in code that only they run is not hit. debugpy
still reports it as verified, since file and line are right.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import datetime
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, TracebackType
from typing import Any

from ddpdoctor.core.user_code import user_file
from ddpdoctor.probe.runtime import (
    control,
    debugpy_private,
    evaluation,
    frame_values,
    profiling,
    rank,
    shield,
    torch_groups,
    torch_private,
)
from ddpdoctor.probe.runtime.control import Message
from ddpdoctor.run.names import DEBUG

# -- code that DataLoader workers run, where breakpoints are not hit

_WORKER_ENTRIES = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")
"""The methods of a data set, and of a transform, that workers call."""

_MAX_PARTS = 64
_MAX_ITEMS = 64  # a longer list holds data, not data sets or transforms

_in_workers: set[CodeType] = set()
_in_this_process: set[CodeType] = set()  # for a loader without workers

worker_code_found: list[Callable[[], None]] = []
"""Called when new code of workers is known."""


def note_worker_code(iterator: Any) -> None:
    """Note the code that a loader's iterator runs. Called once per pass over the data."""
    known = _in_workers if torch_private.workers_of(iterator) else _in_this_process
    found = set(_codes(iterator)) - known
    if found:
        known |= found
        if known is _in_workers:
            for listener in worker_code_found:
                listener()


def lines_in_workers(path: str, lines: Iterable[int]) -> list[int]:
    """Return those of ``lines`` of a file that only workers run."""
    file = os.path.realpath(path)
    spans = [
        _span(code)
        for code in _in_workers - _in_this_process
        if os.path.realpath(code.co_filename) == file
    ]
    return [line for line in lines if any(first <= line <= last for first, last in spans)]


def _codes(iterator: Any) -> Iterator[CodeType]:
    roots = [torch_private.dataset_of(iterator), *torch_private.worker_functions_of(iterator)]
    for part in _parts(roots):
        function = _function(part)
        kind: Any = type(part)
        if function is None:
            yield from _methods(kind)
        elif user_file(function.co_filename):
            yield function


def _parts(roots: list[Any]) -> list[Any]:
    """Return the objects that workers call: ``roots``, and their attributes, such as transforms.

    Attributes are read from ``__dict__``, so that no code of the user runs.
    """
    found: list[Any] = []
    waiting, seen = list(roots), set[int]()
    while waiting and len(found) < _MAX_PARTS:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        kind: Any = type(part)
        if isinstance(part, (list, tuple, dict)):
            if len(part) <= _MAX_ITEMS:
                waiting += part.values() if isinstance(part, dict) else part
        elif isinstance(part, partial):
            waiting.append(part.func)
        elif _function(part) is not None:
            found.append(part)
        elif _has_entries(kind):
            found.append(part)
            with contextlib.suppress(AttributeError):
                waiting += object.__getattribute__(part, "__dict__").values()
    return found


# Cached since each pass over a loader asks for the same few classes.
@lru_cache(maxsize=_MAX_PARTS)
def _has_entries(kind: type) -> bool:
    members = _members(kind)
    return any(_function(members.get(name)) for name in _WORKER_ENTRIES)


@lru_cache(maxsize=_MAX_PARTS)
def _methods(kind: type) -> list[CodeType]:
    """Return the methods of a class that workers call, and those that no other method calls."""
    members = {
        name: code
        for name, member in _members(kind).items()
        if (code := _function(member)) is not None and user_file(code.co_filename)
    }
    entries = members.keys() & set(_WORKER_ENTRIES)
    inside = _called(members, entries)
    outside = _called(members, members.keys() - inside)
    return [members[name] for name in entries | (inside - outside)]


def _called(members: dict[str, CodeType], names: Iterable[str]) -> set[str]:
    """Return these methods of a class, and those that they call."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _names(members[name]) & members.keys()
    return found


def _names(code: CodeType) -> set[str]:
    """Return the attributes and globals that a function names, including its inner functions."""
    found = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= _names(each)
    return found


def _members(kind: type) -> dict[str, Any]:
    return {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}


def _function(member: Any) -> CodeType | None:
    """Return the code of a function, a method or a property, or None for anything else."""
    if isinstance(member, (MethodType, staticmethod, classmethod)):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    if not isinstance(member, FunctionType):
        return None
    # Look behind decorators, such as torch.no_grad().
    inner = inspect.unwrap(member)
    return inner.__code__ if isinstance(inner, FunctionType) else member.__code__


def _span(code: CodeType) -> tuple[int, int]:
    """Return the first and the last line of a function's body, including its inner functions."""
    last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
    inner = [_span(each)[1] for each in code.co_consts if isinstance(each, CodeType)]
    # The line of `def` itself runs where the module is imported.
    return code.co_firstlineno + 1, max([last, *inner])


# -- the debugger

_MAIN_PROGRAM = frozenset({"cpython.run_file", "cpython.run_module", "cpython.run_command"})
_MAX_SOURCE = 1 << 20

PATIENCE = datetime.timedelta(hours=1)
"""Minimum timeout in a job whose code calls ``breakpoint()``, so that a person has time."""

_CHECK = 1.0  # seconds between two checks for the supervisor while waiting for a client

_attached = False  # whether a client is attached and has set its breakpoints
_held = False  # whether an exception of this process was held once
_wake = threading.Event()  # set if a client is attached, or none is needed
_go = threading.Event()  # set once the gate is open


def options() -> frozenset[str]:
    """Return the debugger options of this run, or an empty set."""
    return frozenset(filter(None, os.environ.get(DEBUG, "").split(",")))


def install() -> None:
    """Prepare this process, before the user's first line."""
    wanted = options()
    if not wanted:
        return
    control.actions.update(
        # A response shows that Python runs here.
        answer=lambda _: None,
        debug=_debug,
        attached=_client_came,
        detached=_client_left,
        release=lambda _: _wake.set(),
        go=lambda _: _go.set(),
        lift=lambda _: torch_groups.lift_timeouts(),
        restore=lambda _: torch_groups.lift_timeouts(False),
        workers=_workers,
        variables=frame_values.variables,
        evaluate=frame_values.evaluate,
        evaluate_at_step=evaluation.evaluate,
        profile_steps=profiling.profile,
    )
    worker_code_found.append(lambda: control.say("workers"))
    if wanted & {"error", "lift"}:
        torch_groups.keep_timeouts_at_least(torch_groups.LIFTED_TIMEOUT)
    if "error" in wanted:
        atexit.register(_hold_unseen)
    if control.is_worker():
        names = ("rank", "local_rank", "world_size", "local_world_size")
        _join({name: rank.environment_int(name.upper()) for name in names})
        if "gate" in wanted:
            # Wait later: debugpy cannot be imported while `site` is being imported.
            sys.addaudithook(_before_user_code)


def joined(hello: Message) -> None:
    """Get a port for this new rank if it has none, and wait at the gate."""
    wanted = options()
    if not wanted:
        return
    _join(hello)
    _expect_breakpoint()
    if "gate" in wanted:
        _gate()


def _join(hello: Message) -> None:
    # A rank in another container, for example, cannot be debugged.
    with contextlib.suppress(OSError):
        control.join(hello)
    # A job may have its own hook.
    default = sys.breakpointhook is sys.__breakpointhook__
    if control.is_joined() and default and "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = breakpointhook


# -- requests of the supervisor


def _debug(message: Message) -> Message:
    """Start or wake debugpy, and connect it to the supervisor. The response may be an error."""
    error = debugpy_private.serve_safely(str(message["key"]))
    return {"compiled": torch_private.has_compiled()} if error is None else {"error": error}


def _workers(message: Message) -> Message:
    """Return which of these lines of a file only DataLoader workers run."""
    return {"lines": lines_in_workers(str(message["path"]), message["lines"])}


def _client_came(message: Message) -> None:
    global _attached
    _attached = True
    _wake.set()


def _client_left(message: Message) -> None:
    global _attached
    _attached = False
    debugpy_private.silence()


def forget() -> None:
    """Disable the debugger in a forked child, which must not stop at breakpoints."""
    global _attached
    if control.is_joined():
        control.forget()
        profiling.forget()
        _attached = False
        if sys.breakpointhook is breakpointhook:
            sys.breakpointhook = _pythons
        debugpy_private.leave_child_alone()


# -- the gate before the first user line


def _before_user_code(event: str, args: tuple[Any, ...]) -> None:
    """Wait right before Python runs the main program, which raises one of these audit events."""
    if event in _MAIN_PROGRAM and not _go.is_set():
        _gate()


def _gate() -> None:
    if _go.is_set() or not control.is_joined():
        return
    try:
        _wait(_go)
    except KeyboardInterrupt:
        # End as Python would, without a traceback of ours.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _wait(event: threading.Event) -> None:
    while not event.wait(_CHECK) and not control.ended.is_set():
        pass


def _wait_for_client(why: str, path: str, line: int) -> None:
    _wake.clear()
    control.say("waits", why=why, path=os.path.abspath(path), line=line)
    try:
        if not _attached:
            _wait(_wake)
    finally:
        control.say("goes on", why=why)


# -- breakpoint()

_pythons = sys.breakpointhook
_one_at_a_time = threading.Lock()


def breakpointhook(*args: Any, **kwargs: Any) -> None:
    """Wait for a client if there is none, and stop at the caller's next line."""
    frame = sys._getframe(1)
    try:
        with _one_at_a_time:
            if not _attached:
                _wait_for_client("breakpoint", frame.f_code.co_filename, frame.f_lineno)
            if _attached:
                _stop_at(frame)
    except KeyboardInterrupt as error:
        # Ctrl-C is raised at the line of the user, not where we waited.
        error.__traceback__ = None
        raise


_stop_at = shield.shielded(debugpy_private.stop_at)


@shield.shielded
def _expect_breakpoint() -> None:
    """Extend the timeouts at once in a job whose code calls ``breakpoint()``.

    At the first breakpoint it is too late: peers may already wait, and a collective keeps its
    initial timeout.
    """
    if sys.breakpointhook is not breakpointhook:
        return
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.endswith(".py") and user_file(path):
            line = _first_breakpoint(path)
            if line:
                torch_groups.keep_timeouts_at_least(PATIENCE)
                control.say("expects", path=os.path.abspath(path), line=line)
                return


def _first_breakpoint(path: str) -> int:
    """Return the line of a file's first call of ``breakpoint()``, or 0."""
    try:
        with open(path, "rb") as file:
            source = file.read(_MAX_SOURCE)
        if b"breakpoint(" not in source:
            return 0
        calls = [
            node.lineno
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "breakpoint"
        ]
    except (OSError, ValueError, SyntaxError, RecursionError):
        return 0
    return min(calls, default=0)


# -- uncaught exceptions


def excepthook_runs(
    hook: Callable[..., object] | None,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Call ``hook``, and hold the rank after it if ``--debug-on-error`` asks for that.

    Called while Python audits ``sys.excepthook``, which it is about to call.

    Raises:
        RuntimeError: The hook was called here, so Python must not call it again.
    """
    if not _holds(error) or hook is None:
        return
    hook(kind, error, trace)
    hold(error)
    raise RuntimeError


def _hold_unseen() -> None:
    """Hold the rank at its end for an exception that an excepthook of the job hid."""
    # The interpreter stores the exception here before it calls any hook.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(last, BaseException):
        hold(last)


def hold(error: BaseException) -> None:
    """Hold this rank at an exception until a client has examined it (``--debug-on-error``)."""
    global _held
    if not _holds(error):
        return
    _held = True
    with contextlib.suppress(KeyboardInterrupt):
        _hold(error)


def _holds(error: BaseException) -> bool:
    """Return whether ``--debug-on-error`` applies to this exception."""
    return (
        "error" in options() and not _held and control.is_joined() and isinstance(error, Exception)
    )


@shield.shielded
def _hold(error: BaseException) -> None:
    # Stop at the innermost frame of the user's code, or at the outermost one if there is none.
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return
    mine = [each for each in frames if user_file(each[0].f_code.co_filename)]
    frame, line = mine[-1] if mine else frames[0]
    _wait_for_client("error", frame.f_code.co_filename, line)
    if _attached:
        debugpy_private.stop_at_exception(error)
