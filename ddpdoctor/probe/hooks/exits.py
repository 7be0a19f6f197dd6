"""Wrap the ways a process ends: ``sys.exit``, ``os._exit``, fatal signals, exceptions in threads.

Printed text and exit status stay as they are. The entry (`probe/entry/ddpdoctor_entry.py`) reports
uncaught exceptions.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, NoReturn

from ddpdoctor.probe.observers import failures
from ddpdoctor.probe.runtime import debugger, rank, shield
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.sites import Site, caller
from ddpdoctor.probe.runtime.wrapping import before, when_imported
from ddpdoctor.run.journal import move_up
from ddpdoctor.run.records.process import ErrorRecord, ExitRecord

_MAX_TEXT = 300
_MAX_SEARCHED = 8  # maximum number of frames above ``sys.exit`` that are searched for its reason

_last: tuple[ExitRecord, ErrorRecord | None] | None = None
"""The last call of ``sys.exit``, and the exception behind it."""


def install() -> None:
    """Hook this process, and modules when they are imported."""
    _watch_threads()
    # `print_exc`, `format_exc` and `logging` all end in these two.
    for name in ("print_exception", "format_exception"):
        before(traceback, name, failures.printed)
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
        # Forked children, such as those of multiprocessing, always end this way.
        own = os.getpid() == failures.owner
        if own or rank.current() is not None:
            _hard_exit(status, own)
        os_exit(status)

    # pickle looks for it in that module.
    _exit.__module__ = "os"
    sys.exit = exit
    os._exit = _exit
    atexit.register(_stray_at_exit)
    when_imported("multiprocessing.process", _wrap_process_run)


# -- exceptions that end a thread


def _watch_threads() -> None:
    """Record exceptions that end a thread of the job. Leave ``threading.excepthook`` as it is.

    Each thread keeps a function that calls the hook (Python 3.8 to 3.14).
    """
    make = getattr(threading, "_make_invoke_excepthook", None)
    if make is None:
        return

    @functools.wraps(make)
    def make_invoke_excepthook() -> Callable[[threading.Thread], None]:
        invoke = make()

        def invoke_excepthook(thread: threading.Thread) -> None:
            failures.thread_failed(thread, sys.exc_info()[1])
            invoke(thread)

        return invoke_excepthook

    threading._make_invoke_excepthook = make_invoke_excepthook  # type: ignore[attr-defined]


# -- exits without an exception


@shield.shielded
def _note_exit(status: Any) -> None:
    """Note the call. Only the end of the process shows that it was not caught."""
    global _last
    if threading.current_thread() is not threading.main_thread():
        return
    number = failures.status_of(status)
    said = failures.text_of(status)[:_MAX_TEXT] if number and not isinstance(status, int) else None
    refused = _refusal()
    call = failures.exit_record("sys.exit", number, caller(), said, refused)
    _last = call, failures.behind() if number and not refused else None


def _refusal() -> str:
    """Return the message of ``ArgumentParser.error`` if it makes the process exit."""
    frame: FrameType | None = sys._getframe()
    for _ in range(_MAX_SEARCHED):
        if frame is None:
            break
        code = frame.f_code
        if code.co_name == "error" and os.path.basename(code.co_filename) == "argparse.py":
            return str(frame.f_locals.get("message") or "")[:_MAX_TEXT]
        frame = frame.f_back
    return ""


@shield.shielded
def _hard_exit(status: int, own: bool) -> None:
    """Record an ``os._exit``, after which no ``atexit`` runs. ``own``: not of a forked child."""
    state = rank.current()
    if state is None:
        if status:
            call = failures.exit_record("os._exit", status, caller())
            failures.write_stray(failures.with_reason(call, failures.behind()))
        return
    failures.unseen()
    if own and not state.has_error:
        call = failures.exit_record("os._exit", status, caller())
        reason = failures.behind() if status else None
        state.recorder.add(failures.with_reason(call, reason))
    if status == 0:
        rank.end()
    else:
        state.tracker.finish()
        state.recorder.flush(0.2, last=True)


class Exits(Observer):
    """The end of a rank's interpreter."""

    def rank_ends(self) -> None:
        """Record an end that the hooks missed."""
        state = self.state
        failures.unseen()
        if state.has_error:
            return
        # If a step ended after the call, the exit was caught.
        if _last is not None and _last[0].time > state.tracker.last_change:
            state.recorder.add(failures.with_reason(*_last))
            return
        # The exit status will show whether the exception mattered.
        shown = failures.shown_last()
        if shown is not None:
            state.recorder.add(shown)


@shield.shielded
def _stray_at_exit() -> None:
    """Record a ``sys.exit`` with a status at the end of a process that never became a rank."""
    if rank.current() is None and _last and _last[0].status and _last[0].pid == os.getpid():
        failures.write_stray(failures.with_reason(*_last))


# -- processes of multiprocessing, whose exceptions never reach an excepthook
def _recording(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            failures.uncaught(error)
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
    """Record the exception that ends a process of multiprocessing."""
    state, frames = rank.current(), failures.frames_of(error)
    if state is None or state.has_error or not frames:
        return
    path, line, _ = frames[-1]
    last = _last
    if last is None or (last[0].path, last[0].line) != (path, line):
        # SystemExit was raised without `sys.exit`.
        status = failures.status_of(error.code)
        last = failures.exit_record("SystemExit", status, Site(path, line)), None
    state.has_error = True
    rank.write_now(failures.with_reason(*last))


def _wrap_process_run(module: ModuleType) -> None:
    """Wrap ``multiprocessing.Process.run``, because multiprocessing prints errors itself."""
    process_class = module.BaseProcess
    process_class.run = _recording(process_class.run)


def install_spawn(module: ModuleType) -> None:
    """Wrap ``torch.multiprocessing.spawn``, whose errors reach the parent as text."""
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

    Its handlers call the earlier ones. If the job enables it later, it writes where the job wants.
    """
    if faulthandler.is_enabled():
        return
    try:
        descriptor = move_up(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        )
        faulthandler.enable(descriptor, all_threads=True)
        _hide_faulthandler()
    except (OSError, ValueError) as error:
        shield.fault("faulthandler", error)


def _hide_faulthandler() -> None:
    """Let ``faulthandler`` look disabled until the job enables it."""
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
