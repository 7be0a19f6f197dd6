"""How a process ends: uncaught exceptions, ``sys.exit``, ``os._exit``, fatal signals.

The record is made before the interpreter prints anything, so the times of several ranks tell who
failed first. What is printed, and the exit status, stay as they are.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

from ddpdoctor.probe import debugger, events, file_facts, rank, shield
from ddpdoctor.probe.imports import when_imported
from ddpdoctor.probe.sites import Site, caller, user_file
from ddpdoctor.record import Phase, Record, encode

_MESSAGE = 4_000
_LINE = 1_500
_TRACEBACK = 60_000
_FILE_LINE = re.compile(r'File "([^"\n]+)", line (\d+)')

_last_exit: Record | None = None


def install() -> None:
    """Hook this process; modules it has not imported yet are hooked when it does."""
    _wrap_excepthook()
    _wrap_exits()
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
    tracker = state.tracker
    record["step"] = tracker.steps
    record["armed"] = tracker.armed
    if tracker.failed is not None and tracker.failed[0] == id(error):
        record["phase"], record["collective"] = tracker.failed[1], tracker.failed[2]
    elif _raised_in(error, tracker.optimizer_frame):
        record["phase"] = Phase.OPTIMIZER.label
    for told in events.rank_fails:
        told(error)
    rank.tell(record)


def _raised_in(error: BaseException, frame: FrameType | None) -> bool:
    """Whether the exception flew through that frame."""
    return frame is not None and any(
        each is frame for each, _ in traceback.walk_tb(error.__traceback__)
    )


def describe(error: BaseException) -> Record:
    """An exception as a journal record."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    message = _text(error)
    path, line = _guilty_line(error, message)
    formatted = "".join(traceback.format_exception(kind, error, error.__traceback__))
    record: Record = {
        "kind": "error",
        "time": time.time_ns(),
        "pid": os.getpid(),
        "exception": name,
        "message": _shortened(message),
        "path": path,
        "line": line,
        "user_frames": _user_frames(error),
        "traceback": formatted[-_TRACEBACK:],
    }
    try:
        file = file_facts.facts(error)
    except Exception as fault:
        shield.fault("file_facts", fault)
    else:
        record.update({} if file is None else {"file": file})
    return record


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message could not be made)"


def _shortened(message: str) -> str:
    """A message that is not too long, with the beginning of each line of it."""
    if len(message) <= _MESSAGE:
        return message
    # A load_state_dict tells of missing keys in one line, and of unexpected ones in the next.
    return "\n".join(line[:_LINE] for line in message[: 1 << 20].splitlines()[:100])[:_MESSAGE]


def _user_frames(error: BaseException) -> list[tuple[str, int, str]]:
    return [
        (os.path.abspath(frame.f_code.co_filename), number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if user_file(frame.f_code.co_filename)
    ]


def _guilty_line(error: BaseException, message: str) -> tuple[str, int]:
    if isinstance(error, SyntaxError) and error.filename:
        return os.path.abspath(error.filename), error.lineno or 0
    if "Original Traceback" in message:
        # A DataLoader worker's exception, raised again in the rank with its text.
        inner = [found for found in _FILE_LINE.findall(message) if user_file(found[0])]
        if inner:
            return os.path.abspath(inner[-1][0]), int(inner[-1][1])
    frames = _user_frames(error)
    return (frames[-1][0], frames[-1][1]) if frames else ("", 0)


def stray(record: Record) -> None:
    """Write a record of a process that is no rank (yet): the file is made only now."""
    path = os.path.join(rank.run_directory(), f"process-{os.getpid()}.jsonl")
    number = rank.environment_int("RANK")
    record = {
        **record,
        "rank": number,
        "restart": rank.environment_int("TORCHELASTIC_RESTART_COUNT") or 0,
        # torchrun makes its workers session leaders; a helper program of a worker is none.
        "leads_session": os.getsid(0) == os.getpid(),
        "argv": list(getattr(sys, "argv", [])),
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, encode(record))
    finally:
        os.close(descriptor)


# -- exits without an exception


def _wrap_exits() -> None:
    sys_exit, os_exit = sys.exit, os._exit
    owner = os.getpid()

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
        own = os.getpid() == owner
        if own or rank.current() is not None:
            _hard_exit(status, own)
        os_exit(status)

    sys.exit = exit
    os._exit = _exit
    atexit.register(_stray_at_exit)


def _exit_record(how: str, status: int, site: Site) -> Record:
    return {
        "kind": "exit",
        "time": time.time_ns(),
        "pid": os.getpid(),
        "how": how,
        "status": status,
        "path": site.path,
        "line": site.line,
    }


@shield.shielded
def _note_exit(status: Any) -> None:
    """Remember the call; only the end of the process tells whether it was not caught."""
    global _last_exit
    if threading.current_thread() is not threading.main_thread():
        return
    number = 0 if status is None else status if isinstance(status, int) else 1
    _last_exit = _exit_record("sys.exit", number, caller())
    state = rank.current()
    if state is not None:
        _last_exit["step"], _last_exit["armed"] = state.tracker.steps, state.tracker.armed


@shield.shielded
def _hard_exit(status: int, own: bool) -> None:
    """``os._exit``: no ``atexit`` comes after it. ``own``: not the end of a forked child."""
    state = rank.current()
    if state is not None:
        _unseen_exception()
        if own and not state.error_told:
            record = _exit_record("os._exit", status, caller())
            record["step"], record["armed"] = state.tracker.steps, state.tracker.armed
            state.recorder.add(record)
        if status == 0:
            rank.end()
        else:
            state.tracker.finish()
            state.recorder.flush(0.2, last=True)
    elif status:
        stray(_exit_record("os._exit", status, caller()))


def _unseen_exception() -> None:
    """Record the exception that ended the main thread if an excepthook of the job hid it."""
    # The interpreter keeps it here before it calls any hook.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(last, BaseException):
        uncaught(last)


def at_exit(state: rank.RankState) -> None:
    """At the interpreter's end: what the hooks above did not see."""
    _unseen_exception()
    call = _last_exit
    # A call with steps after it was caught.
    if call is not None and not state.error_told and call["time"] > state.tracker.last_change:
        state.recorder.add(call)


@shield.shielded
def _stray_at_exit() -> None:
    """At the end of a process that never became a rank: a ``sys.exit`` with a status."""
    call = _last_exit
    if rank.current() is None and call and call["status"] and call["pid"] == os.getpid():
        stray(call)


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

    return run


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
