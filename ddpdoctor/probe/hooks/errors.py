"""How a process ends: uncaught exceptions, ``sys.exit``, ``os._exit``, fatal signals.

The record is made before the interpreter prints anything, so the times of several ranks tell who
failed first. What is printed, and the exit status, stay as they are.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

from ddpdoctor.probe.observers import file_facts, inner, ports
from ddpdoctor.probe.runtime import debugger, events, rank, shield, watch
from ddpdoctor.probe.runtime.imports import when_imported
from ddpdoctor.probe.runtime.sites import Site, caller
from ddpdoctor.run.records.base import JsonObject, encode
from ddpdoctor.run.status import Phase

_MESSAGE = 4_000
_LINE = 1_500
_TRACEBACK = 60_000
_SAID = 300
_NEAR = 8
"""Frames above ``sys.exit`` in which its reason is looked for."""

_SAME = 1_000_000_000
"""Nanoseconds within which an exception of the same id is the same one."""

_FRESH = 60_000_000_000
"""Nanoseconds after which an exception that was printed explains no exit."""

_NO_FAILURE = ("SystemExit", "GeneratorExit", "Exit", "Abort")
"""Exceptions by which a script, or click, leaves on purpose."""

_format_exception = traceback.format_exception
_owner = os.getpid()
_last_exit: JsonObject | None = None
_shown: tuple[int, JsonObject] | None = None
"""The exception that was printed last, with its id: the process may end of it without raising."""


def install() -> None:
    """Hook this process; modules it has not imported yet are hooked when it does."""
    _wrap_excepthook()
    _wrap_thread_excepthook()
    _wrap_printing()
    _wrap_exits()
    events.rank_ends.insert(0, _at_exit)
    when_imported("multiprocessing.process", _wrap_process_run)


# -- uncaught exceptions


def _wrap_excepthook() -> None:
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        uncaught(error)
        previous(kind, error, trace)

    sys.excepthook = excepthook


@shield.shielded
def uncaught(error: BaseException) -> None:
    """Record an exception that ends this process."""
    state = rank.current()
    if state is not None and state.error_told:
        return
    record = describe(error)
    if state is None:
        stray(record)
        return
    state.error_told = True
    _placed(record, error)
    for told in events.rank_fails:
        told(error)
    rank.tell(record)


def _placed(record: JsonObject, error: BaseException) -> None:
    """Add what the rank did at that moment, if this process is one."""
    state = rank.current()
    if state is None:
        return
    tracker = state.tracker
    record["step"] = tracker.steps
    record["armed"] = tracker.armed
    if tracker.failed is not None and tracker.failed[0] == id(error):
        record["phase"], record["collective"] = tracker.failed[1], tracker.failed[2]
    elif _raised_in(error, tracker.optimizer_frame):
        record["phase"] = Phase.OPTIMIZER.label


def _raised_in(error: BaseException, frame: FrameType | None) -> bool:
    """Whether the exception flew through that frame."""
    return frame is not None and any(
        each is frame for each, _ in traceback.walk_tb(error.__traceback__)
    )


def describe(error: BaseException) -> JsonObject:
    """An exception as a journal record."""
    record = _in_words(error)
    try:
        file = file_facts.facts(error) or ports.facts(inner.text(error))
    except Exception as fault:
        shield.fault("file_facts", fault)
    else:
        record.update({} if file is None else {"file": file})
    return record


def _in_words(error: BaseException) -> JsonObject:
    """The same without what the system knows of its file."""
    raised, outer = inner.told(error)
    formatted = "".join(_format_exception(type(error), error, error.__traceback__))
    record: JsonObject = {
        "kind": "error",
        "time": time.time_ns(),
        "pid": os.getpid(),
        "exception": raised.name,
        "message": _shortened(raised.message),
        "path": raised.path,
        "line": raised.line,
        "user_frames": inner.frames(error),
        "traceback": formatted[-_TRACEBACK:],
    }
    if outer is not None:
        record["outer"] = {
            "exception": outer.name,
            "message": _shortened(outer.message),
            "path": outer.path,
            "line": outer.line,
        }
    return record


def _shortened(message: str) -> str:
    """A message that is not too long, with the beginning of each line of it."""
    if len(message) <= _MESSAGE:
        return message
    # A load_state_dict tells of missing keys in one line, and of unexpected ones in the next.
    return "\n".join(line[:_LINE] for line in message[: 1 << 20].splitlines()[:100])[:_MESSAGE]


def stray(record: JsonObject) -> None:
    """Write a record of a process that is no rank (yet): the file is made only now."""
    path = os.path.join(rank.run_directory(), f"process-{os.getpid()}.jsonl")
    number = rank.environment_int("RANK")
    record = {
        **record,
        "rank": number,
        "restart": rank.environment_int("TORCHELASTIC_RESTART_COUNT") or 0,
        # torchrun makes its workers session leaders; a helper program of a worker is none.
        # The job's own command leads none where it keeps its terminal.
        "leads_session": os.getsid(0) == os.getpid() or watch.is_command(),
        "argv": list(getattr(sys, "argv", [])),
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, encode(record))
    finally:
        os.close(descriptor)


# -- exceptions that end no process by themselves


def _wrap_thread_excepthook() -> None:
    """Of an exception in a thread the main one learns nothing, and fails of something else."""
    previous = threading.excepthook

    def excepthook(args: Any, /) -> None:
        _thread_failed(args)
        previous(args)

    threading.excepthook = excepthook


@shield.shielded
def _thread_failed(args: Any) -> None:
    state, error = rank.current(), args.exc_value
    if state is None or error is None or isinstance(error, SystemExit):
        return
    record = {**_in_words(error), "kind": "thread_error"}
    record["thread"] = str(getattr(args.thread, "name", ""))
    _placed(record, error)
    state.recorder.add(record)


def _wrap_printing() -> None:
    """``print_exc``, ``format_exc`` and ``logging`` all end in these two."""
    for name in ("print_exception", "format_exception"):
        setattr(traceback, name, _noting(getattr(traceback, name)))


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def show(*args: Any, **kwargs: Any) -> Any:
        _note_shown(args, kwargs)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise

    return show


@shield.shielded
def _note_shown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Remember what is printed; the exception itself would keep its frames alive."""
    global _shown
    error = kwargs.get("value", args[1] if len(args) > 1 else args[0] if args else None)
    if not isinstance(error, BaseException) or not _is_failure(error):
        return
    if os.getpid() != _owner and rank.current() is None:
        return
    if _shown is None or _shown[0] != id(error) or time.time_ns() - _shown[1]["time"] > _SAME:
        record = _in_words(error)
        _placed(record, error)
        _shown = id(error), record


def _is_failure(error: BaseException) -> bool:
    return type(error).__name__ not in _NO_FAILURE


def _behind() -> JsonObject | None:
    """The exception for which the process is being left: it is being handled, or was printed.

    One after which a step went on had been dealt with.
    """
    error = sys.exc_info()[1]
    if error is not None and _is_failure(error):
        record = describe(error)
        _placed(record, error)
        return record
    state = rank.current()
    if _shown is None or time.time_ns() - _shown[1]["time"] > _FRESH:
        return None
    if state is not None and _shown[1].get("step") != state.tracker.steps:
        return None
    return _shown[1]


# -- exits without an exception


def _wrap_exits() -> None:
    sys_exit, os_exit = sys.exit, os._exit

    @functools.wraps(sys_exit)
    def exit(status: Any = None, /) -> NoReturn:
        _note_exit(status)
        try:
            sys_exit(status)
        except SystemExit as error:
            shield.hide_frame(error)
            raise

    @functools.wraps(os_exit)
    def _exit(status: int) -> NoReturn:
        # Forked children (multiprocessing's among them) always end this way, ranks or not.
        own = os.getpid() == _owner
        if own or rank.current() is not None:
            _hard_exit(status, own)
        os_exit(status)

    sys.exit = exit
    os._exit = _exit
    atexit.register(_stray_at_exit)


def _exit_record(how: str, status: int, site: Site) -> JsonObject:
    return {
        "kind": "exit",
        "time": time.time_ns(),
        "pid": os.getpid(),
        "how": how,
        "status": status,
        "path": site.path,
        "line": site.line,
    }


def _told_exit(call: JsonObject) -> JsonObject:
    """The record of an exit: that of the exception behind it, where there is one."""
    behind = call.pop("behind", None)
    return call if behind is None else {**behind, "left": call}


@shield.shielded
def _note_exit(status: Any) -> None:
    """Remember the call; only the end of the process tells whether it was not caught."""
    global _last_exit
    if threading.current_thread() is not threading.main_thread():
        return
    number = 0 if status is None else status if isinstance(status, int) else 1
    _last_exit = _exit_record("sys.exit", number, caller())
    if number and not isinstance(status, int):
        _last_exit["said"] = inner.text(status)[:_SAID]
    refused = _refusal()
    if refused:
        _last_exit["refused"] = refused
    elif number:
        _last_exit["behind"] = _behind()
    state = rank.current()
    if state is not None:
        _last_exit["step"], _last_exit["armed"] = state.tracker.steps, state.tracker.armed


def _refusal() -> str:
    """What ``ArgumentParser.error`` was given, if that is what leaves."""
    frame: FrameType | None = sys._getframe()
    for _ in range(_NEAR):
        if frame is None:
            break
        code = frame.f_code
        if code.co_name == "error" and os.path.basename(code.co_filename) == "argparse.py":
            return str(frame.f_locals.get("message") or "")[:_SAID]
        frame = frame.f_back
    return ""


@shield.shielded
def _hard_exit(status: int, own: bool) -> None:
    """``os._exit``: no ``atexit`` comes after it. ``own``: not the end of a forked child."""
    state = rank.current()
    if state is not None:
        _unseen_exception()
        if own and not state.error_told:
            record = _exit_record("os._exit", status, caller())
            record["step"], record["armed"] = state.tracker.steps, state.tracker.armed
            record["behind"] = _behind() if status else None
            state.recorder.add(_told_exit(record))
        if status == 0:
            rank.end()
        else:
            state.tracker.finish()
            state.recorder.flush(0.2, last=True)
    elif status:
        record = _exit_record("os._exit", status, caller())
        record["behind"] = _behind()
        stray(_told_exit(record))


def _unseen_exception() -> None:
    """Record the exception that ended the main thread if an excepthook of the job hid it."""
    # The interpreter keeps it here before it calls any hook.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(last, BaseException):
        uncaught(last)


def _at_exit() -> None:
    """At the interpreter's end: what the hooks above did not see."""
    state = rank.current()
    if state is None:
        return
    _unseen_exception()
    call = _last_exit
    # A call with steps after it was caught.
    if state.error_told:
        return
    if call is not None and call["time"] > state.tracker.last_change:
        state.recorder.add(_told_exit(call))
    elif _shown is not None and _shown[1].get("step") == state.tracker.steps:
        # The status tells whether it mattered.
        state.recorder.add({**_shown[1], "kind": "shown_error"})


@shield.shielded
def _stray_at_exit() -> None:
    """At the end of a process that never became a rank: a ``sys.exit`` with a status."""
    call = _last_exit
    if rank.current() is None and call and call["status"] and call["pid"] == os.getpid():
        stray(_told_exit(call))


# -- processes made by multiprocessing, whose exceptions never reach an excepthook


def _recording(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            uncaught(error)
            debugger.hold(error)
            shield.hide_frame(error)
            raise
        except SystemExit as error:
            _leaves(error)
            shield.hide_frame(error)
            raise

    return run


@shield.shielded
def _leaves(error: SystemExit) -> None:
    """Record what ends a process of multiprocessing, which exits once more by itself afterwards."""
    state, told = rank.current(), inner.frames(error)
    if state is None or state.error_told or not told:
        return
    path, line, _ = told[-1]
    call = _last_exit
    if call is None or (call["path"], call["line"]) != (path, line):
        # It was raised without a call of `sys.exit`.
        code = error.code
        number = 0 if code is None else code if isinstance(code, int) else 1
        call = _exit_record("SystemExit", number, Site(path, line))
        call["step"], call["armed"] = state.tracker.steps, state.tracker.armed
    state.error_told = True
    rank.tell(_told_exit(call))


def _wrap_process_run(module: ModuleType) -> None:
    """``multiprocessing.Process.run``: its errors are printed by multiprocessing itself."""
    process_class = module.BaseProcess
    process_class.run = _recording(process_class.run)


def install_spawn(module: ModuleType) -> None:
    """``torch.multiprocessing.spawn``: its errors travel to the parent as text."""
    original = getattr(module, "_wrap", None)
    if original is None:
        return

    @functools.wraps(original)
    def _wrap(fn: Callable[..., Any], *args: Any) -> Any:
        return original(_recording(fn), *args)

    module._wrap = _wrap  # type: ignore[attr-defined]


# -- fatal signals


def watch_fatal_signals(path: str) -> None:
    """Let ``faulthandler`` write to ``path``, unless the job uses it itself.

    Its handlers chain to those that were there before, and a job that enables it later gets it.
    """
    if faulthandler.is_enabled():
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        faulthandler.enable(descriptor, all_threads=True)
        _hide_faulthandler()
    except (OSError, ValueError) as error:
        shield.fault("faulthandler", error)


def _hide_faulthandler() -> None:
    """Until the job enables ``faulthandler`` itself, it is told that nobody has."""
    enable, is_enabled = faulthandler.enable, faulthandler.is_enabled
    ours = True

    @functools.wraps(enable)
    def enable_for_job(*args: Any, **kwargs: Any) -> None:
        nonlocal ours
        enable(*args, **kwargs)
        ours = False

    @functools.wraps(is_enabled)
    def is_enabled_by_job() -> bool:
        return not ours and is_enabled()

    faulthandler.enable = enable_for_job
    faulthandler.is_enabled = is_enabled_by_job
