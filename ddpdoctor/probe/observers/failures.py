"""What a process ends of, as records.

An exception is recorded before the interpreter prints anything, so the times of several ranks tell
which failed first.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import fields, replace
from threading import Thread
from types import CodeType
from typing import Any

from ddpdoctor.probe.observers import file_facts, inner, ports
from ddpdoctor.probe.runtime import events, rank, shield, watch
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.records.base import CodeFrame, encode
from ddpdoctor.run.records.process import (
    EndOfProcess,
    ErrorRecord,
    ExitRecord,
    OuterError,
    ShownErrorRecord,
    ThreadErrorRecord,
)
from ddpdoctor.run.status import Phase

_MESSAGE = 4_000
_LINE = 1_500
_TRACEBACK = 60_000

_SAME = 1_000_000_000
"""Nanoseconds within which an exception of the same id is the same one."""

_FRESH = 60_000_000_000
"""Nanoseconds after which an exception that was printed explains no exit."""

_NO_FAILURE = ("SystemExit", "GeneratorExit", "Exit", "Abort")
"""Exceptions by which a script, or click, leaves on purpose."""

_format_exception = traceback.format_exception
owner = os.getpid()
"""The process that loaded the probe: forked children (of multiprocessing, say) end otherwise."""

_shown: tuple[int, ErrorRecord] | None = None
"""The exception that was printed last, with its id: the process may end of it without raising."""


# -- exceptions


@shield.shielded
def uncaught(error: BaseException) -> None:
    """Record an exception that ends this process."""
    state = rank.current()
    if state is not None and state.has_error:
        return
    record = describe(error)
    if state is None:
        stray(record)
        return
    state.has_error = True
    record = _placed(record, error)
    for subscriber in events.rank_fails:
        subscriber(error)
    rank.write_now(record)


def unseen() -> None:
    """Record the exception that ended the main thread if an excepthook of the job hid it."""
    # The interpreter keeps it here before it calls any hook.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(last, BaseException):
        uncaught(last)


@shield.shielded
def thread_failed(thread: Thread, error: BaseException | None) -> None:
    """Record an exception in a thread, of which the main one learns nothing."""
    state = rank.current()
    if state is not None and error is not None and not isinstance(error, SystemExit):
        record = _placed(_in_words(error), error)
        state.recorder.add(ThreadErrorRecord(thread=thread.name, **_values(record)))


def _placed(record: ErrorRecord, error: BaseException) -> ErrorRecord:
    """The record with what the rank did at that moment, if this process is one."""
    state = rank.current()
    if state is None:
        return record
    tracker = state.tracker
    record = replace(record, step=tracker.steps, armed=tracker.armed)
    if tracker.failed is not None and tracker.failed[0] == id(error):
        return replace(record, phase=Phase(tracker.failed[1]).label, collective=tracker.failed[2])
    if _raised_in(error, tracker.optimizer_code):
        return replace(record, phase=Phase.OPTIMIZER.label)
    return record


def _raised_in(error: BaseException, code: CodeType | None) -> bool:
    """Whether the exception flew through that code."""
    return code is not None and any(
        each.f_code is code for each, _ in traceback.walk_tb(error.__traceback__)
    )


def describe(error: BaseException) -> ErrorRecord:
    """An exception as a record, with what the system knows of its file or port."""
    record = _in_words(error)
    try:
        file = file_facts.facts(error) or ports.facts(inner.text(error))
    except Exception as fault:
        shield.fault("file_facts", fault)
        return record
    return replace(record, file=file)


def _in_words(error: BaseException) -> ErrorRecord:
    raised, outer = inner.unwrapped(error)
    formatted = "".join(_format_exception(type(error), error, error.__traceback__))
    return ErrorRecord(
        time=time.time_ns(),
        pid=os.getpid(),
        exception=raised.name,
        message=_shortened(raised.message),
        path=raised.path,
        line=raised.line,
        user_frames=tuple(CodeFrame(*frame) for frame in inner.frames(error)),
        traceback=formatted[-_TRACEBACK:],
        outer=outer
        and OuterError(
            exception=outer.name,
            message=_shortened(outer.message),
            path=outer.path,
            line=outer.line,
        ),
    )


def _shortened(message: str) -> str:
    """A message that is not too long, with the beginning of each line of it."""
    if len(message) <= _MESSAGE:
        return message
    # A load_state_dict has missing keys in one line, and unexpected ones in the next.
    return "\n".join(line[:_LINE] for line in message[: 1 << 20].splitlines()[:100])[:_MESSAGE]


def _values(record: ErrorRecord) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(record)}


def stray(record: EndOfProcess) -> None:
    """Write a record of a process that is no rank (yet): the file is made only now."""
    path = os.path.join(rank.run_directory(), f"process-{os.getpid()}.jsonl")
    record = replace(
        record,
        rank=rank.environment_int("RANK"),
        restart=rank.environment_int("TORCHELASTIC_RESTART_COUNT") or 0,
        # torchrun makes its workers session leaders; a helper program of a worker is none.
        # The job's own command leads none where it keeps its terminal.
        leads_session=os.getsid(0) == os.getpid() or watch.is_command(),
        argv=tuple(getattr(sys, "argv", [])),
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, encode(record))
    finally:
        os.close(descriptor)


# -- exceptions that were printed, and end no process by themselves


@shield.shielded
def printed(*args: Any, **kwargs: Any) -> None:
    """Remember what is printed; the exception itself would keep its frames alive."""
    global _shown
    error = kwargs.get("value", args[1] if len(args) > 1 else args[0] if args else None)
    if not isinstance(error, BaseException) or not _is_failure(error):
        return
    if os.getpid() != owner and rank.current() is None:
        return
    if _shown is None or _shown[0] != id(error) or time.time_ns() - _shown[1].time > _SAME:
        _shown = id(error), _placed(_in_words(error), error)


def _is_failure(error: BaseException) -> bool:
    return type(error).__name__ not in _NO_FAILURE


def behind() -> ErrorRecord | None:
    """The exception for which the process is being left: it is being handled, or was printed.

    One after which a step went on had been dealt with.
    """
    error = sys.exc_info()[1]
    if error is not None and _is_failure(error):
        return _placed(describe(error), error)
    if _shown is None or time.time_ns() - _shown[1].time > _FRESH:
        return None
    return _shown[1] if rank.current() is None else _shown_in_step()


def _shown_in_step() -> ErrorRecord | None:
    state = rank.current()
    same = state is not None and _shown is not None and _shown[1].step == state.tracker.steps
    return _shown[1] if same and _shown is not None else None


def shown_last() -> ShownErrorRecord | None:
    """The exception that was printed in the rank's last step."""
    record = _shown_in_step()
    return None if record is None else ShownErrorRecord(**_values(record))


# -- exits without an exception


def exit_record(
    how: str, status: int, site: Site, said: str | None = None, refused: str = ""
) -> ExitRecord:
    """The record of a call that ends the process."""
    state = rank.current()
    return ExitRecord(
        time=time.time_ns(),
        pid=os.getpid(),
        how=how,
        status=status,
        said=said,
        refused=refused,
        step=state.tracker.steps if state is not None else None,
        armed=state.tracker.armed if state is not None else 0,
        **site.place,
    )


def with_reason(call: ExitRecord, reason: ErrorRecord | None) -> ExitRecord | ErrorRecord:
    """What an exit is recorded as: the exception behind it, where there is one."""
    return call if reason is None else replace(reason, left=call)


def status_of(code: object) -> int:
    """The status with which ``sys.exit(code)`` ends a process."""
    return 0 if code is None else code if isinstance(code, int) else 1
