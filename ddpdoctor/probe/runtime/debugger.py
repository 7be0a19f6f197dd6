"""Run the debugger in a rank: started when somebody attaches, silent again after they left.

debugpy is imported by the first client's request, on the control thread. It listens nowhere: each
session is a connection that the rank makes to the supervisor, which passes the client's bytes. A
rank waits for a client at three places: before its first user line if asked to, at
``breakpoint()``, and after an uncaught exception if asked to.

DataLoader workers have no debugger, so a breakpoint in code that only they run is not hit, although
debugpy answers it as verified: the file and the line are right.
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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any

from ddpdoctor.core.user_code import user_file
from ddpdoctor.probe.runtime import (
    control,
    debugpy_private,
    rank,
    shield,
    torch_groups,
    torch_private,
)
from ddpdoctor.probe.runtime.control import Message
from ddpdoctor.run.names import DEBUG

# -- code that DataLoader workers run: no debugger is in them, so a breakpoint there is not hit


_WORKER_ENTRIES = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")
"""The methods of a data set, and of a transform, that workers call by themselves."""

_MOST_PARTS = 64
_MOST_ITEMS = 64
"""A longer list holds data, not data sets or transforms."""

_in_workers: set[CodeType] = set()
_in_this_process: set[CodeType] = set()
"""What this process runs itself, for a loader without workers."""

worker_code_found: list[Callable[[], None]] = []
"""Called when code has become known that workers run."""


def note_worker_code(iterator: Any) -> None:
    """Take in whose code a loader's iterator runs; called once per pass over the data."""
    known = _in_workers if torch_private.workers_of(iterator) else _in_this_process
    found = set(_codes(iterator)) - known
    if found:
        known |= found
        if known is _in_workers:
            for listener in worker_code_found:
                listener()


def lines_in_workers(path: str, lines: Iterable[int]) -> list[int]:
    """Those of ``lines`` of a file that only workers run."""
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
        elif any(_function(_members(type(part)).get(name)) for name in _WORKER_ENTRIES):
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
    entries = members.keys() & set(_WORKER_ENTRIES)
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


# -- the debugger in a rank: started when somebody attaches, silent again after they left


_MAIN_PROGRAM = frozenset({"cpython.run_file", "cpython.run_module", "cpython.run_command"})
_MOST_SOURCE = 1 << 20

PATIENCE = datetime.timedelta(hours=1)
"""The least timeout in a job whose code calls ``breakpoint()``: a person has to get there."""

_CHECK = 1.0
"""Seconds between two looks whether the supervisor is still there, while waiting for a client."""

_attached = False
"""A client is attached and has set its breakpoints."""

_held = False
"""An exception of this process was held once."""

_wake = threading.Event()
"""Whoever waits for a client may go on: one is attached, or none is needed."""

_go = threading.Event()
"""The gate is open."""


def options() -> frozenset[str]:
    """What this run wants of the debugger; empty for none."""
    return frozenset(filter(None, os.environ.get(DEBUG, "").split(",")))


def install() -> None:
    """Called once per process, before the user's first line."""
    wanted = options()
    if not wanted:
        return
    control.actions.update(
        # That this is answered at all says that Python runs here.
        answer=lambda _: None,
        debug=_debug,
        attached=_client_came,
        detached=_client_left,
        release=lambda _: _wake.set(),
        go=lambda _: _go.set(),
        lift=lambda _: torch_groups.lift_timeouts(),
        restore=lambda _: torch_groups.restore_timeouts(),
        workers=_workers,
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
            # Not here: while `site` is being imported, debugpy cannot be.
            sys.addaudithook(_before_user_code)


def joined(hello: Message) -> None:
    """This process has become a rank: it gets a port if it has none, and waits at the gate."""
    wanted = options()
    if not wanted:
        return
    _join(hello)
    _expect_breakpoint()
    if "gate" in wanted:
        _gate()


def _join(hello: Message) -> None:
    # In another container, say, it is a rank that cannot be debugged.
    with contextlib.suppress(OSError):
        control.join(hello)
    if control.is_joined() and "PYTHONBREAKPOINT" not in os.environ:
        _wrap_breakpoint()


# -- what the supervisor asks for


def _debug(message: Message) -> Message:
    """Start debugpy, or wake it, and connect it to the supervisor; the answer may have an error."""
    error = debugpy_private.serve_safely(str(message["key"]))
    return {"compiled": torch_private.has_compiled()} if error is None else {"error": error}


def _workers(message: Message) -> Message:
    """Which of these lines of a file only DataLoader workers run."""
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
    """In a forked child: it cannot be debugged, and must not stop where its parent would."""
    global _attached
    if control.is_joined():
        control.forget()
        _attached = False
        if sys.breakpointhook is breakpointhook:
            sys.breakpointhook = _pythons
        debugpy_private.leave_child_alone()


# -- the gate before the first user line


def _before_user_code(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: Python raises one of these right before it runs the main program."""
    if event in _MAIN_PROGRAM and not _go.is_set():
        _gate()


def _gate() -> None:
    if _go.is_set() or not control.is_joined():
        return
    try:
        _wait(_go)
    except KeyboardInterrupt:
        # Ended as Python ends of it, without a traceback of ours.
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


def _wrap_breakpoint() -> None:
    # The job may have its own hook, which then is what it wants.
    if sys.breakpointhook is sys.__breakpointhook__:
        sys.breakpointhook = breakpointhook


def breakpointhook(*args: Any, **kwargs: Any) -> None:
    """``breakpoint()``: wait for a client if there is none, and stop at the caller's next line."""
    frame = sys._getframe(1)
    try:
        with _one_at_a_time:
            if not _attached:
                _wait_for_client("breakpoint", frame.f_code.co_filename, frame.f_lineno)
            if _attached:
                _stop_at(frame)
    except KeyboardInterrupt as error:
        # Ctrl-C at the line of the user; where we waited is no concern of theirs.
        error.__traceback__ = None
        raise


_stop_at = shield.shielded(debugpy_private.stop_at)


@shield.shielded
def _expect_breakpoint() -> None:
    """Lengthen the timeouts at once in a job whose code calls ``breakpoint()``.

    When the first rank gets there it is too late: its peers may be waiting for it already, and a
    collective keeps the timeout it began with.
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
    """The line of a file's first call of ``breakpoint()``; 0 without one."""
    try:
        with open(path, "rb") as file:
            source = file.read(_MOST_SOURCE)
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
    """Call ``hook`` and hold the rank after it, where ``--debug-on-error`` asks for that.

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
    """At the interpreter's end: the exception that ended it, if the job's own hook kept it."""
    # The interpreter keeps it here before it calls any hook.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(last, BaseException):
        hold(last)


def hold(error: BaseException) -> None:
    """With ``--debug-on-error``: hold this rank at the exception until it has been looked at."""
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
    frame, line = _guilty_frame(error)
    if frame is None:
        return
    _wait_for_client("error", frame.f_code.co_filename, line)
    if _attached:
        debugpy_private.stop_at_exception(error)


def _guilty_frame(error: BaseException) -> tuple[FrameType | None, int]:
    """The innermost frame of the user's code in the traceback, and its line."""
    found: tuple[FrameType | None, int] = (None, 0)
    trace = error.__traceback__
    while trace is not None:
        if found[0] is None or user_file(trace.tb_frame.f_code.co_filename):
            found = trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    return found
