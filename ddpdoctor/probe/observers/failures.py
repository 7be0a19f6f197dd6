"""Record what ends a process, and the files that it saves and loads."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import fields, replace
from threading import Thread
from typing import Any, NamedTuple

from ddpdoctor.core.user_code import user_file
from ddpdoctor.probe.observers import files, job_launch
from ddpdoctor.probe.runtime import events, rank, shield, torch_private, watch
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.sites import Site, caller
from ddpdoctor.run.records.base import CodeFrame, encode
from ddpdoctor.run.records.process import (
    EndOfProcess,
    ErrorRecord,
    ExitRecord,
    OuterError,
    PendingErrorRecord,
    ResourceFacts,
    ShownErrorRecord,
    ThreadErrorRecord,
)
from ddpdoctor.run.records.training import GpuLoadRecord, SaveRecord
from ddpdoctor.run.status import Phase

# -- files that ``torch.save`` writes, and GPUs that ``torch.load`` puts tensors on

MAX_FILES = 50  # maximum number of recorded paths and of loads: a job may give each file a new name

_CONTENT_DEPTH = 3
_WRAPPER_PREFIX = "module."


def tensors_loaded(device: Any, mapped: bool) -> None:
    """Record that ``torch.load`` put a storage on a GPU. ``mapped``: it had a ``map_location``."""
    site = caller()
    record = GpuLoadRecord(
        time=time.time_ns(),
        device=str(device),
        device_uuid=torch_private.device_uuid(sys.modules["torch"], device),
        mapped=mapped,
        **site.place,
    )
    rank.add(record, MAX_FILES, once=("load", site.path, site.line, str(device)))


class Checkpoints(Observer):
    """The checkpoints that a rank saves."""

    def saves(self, content: Any, file: Any) -> None:
        """Record a saved file once per kind of content."""
        path = path_of(file)
        path = "" if os.path.exists(path) and not os.path.isfile(path) else path
        if path:
            kind = _content(content)
            record = SaveRecord(
                time=time.time_ns(),
                file=path,
                content=kind,
                step=self.state.tracker.steps,
                **caller().place,
            )
            self.state.add(record, MAX_FILES, once=("save", path, kind))


def path_of(file: Any) -> str:
    """Return the resolved path of an argument of ``torch.save`` or ``torch.load``, or ""."""
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    path = os.fspath(name) if isinstance(name, (str, os.PathLike)) else ""
    return os.path.realpath(path) if isinstance(path, str) and path else ""


def _content(obj: Any, depth: int = _CONTENT_DEPTH) -> str:
    """Classify a checkpoint's content as DDP502 judges it.

    Returns:
        ``module`` for a pickled model, ``wrapper`` for a pickled DDP module, ``wrapped`` for keys
        with the wrapper's prefix, and ``data`` for anything else, such as modules without
        parameters. A wrapper within the wrapped model gives some of the keys the prefix. All of
        them have it only if they come from the outermost wrapper.
    """
    torch = sys.modules["torch"]
    if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
        return "wrapper"
    if isinstance(obj, torch.nn.Module):
        return "data" if next(obj.parameters(), None) is None else "module"
    if not isinstance(obj, Mapping) or not obj:
        return "data"
    tensors = [key for key, value in obj.items() if isinstance(value, torch.Tensor)]
    if tensors and all(isinstance(key, str) and key.startswith(_WRAPPER_PREFIX) for key in tensors):
        return "wrapped"
    nested = list(obj.values())[:20] if depth else []
    return next(
        (found for each in nested if (found := _content(each, depth - 1)) != "data"), "data"
    )


# -- the file or address that an exception is about, and the free space

_SERIALIZATION = os.path.join("torch", "serialization.py")
_DOWNLOADERS = (
    (os.path.join("urllib", "request.py"), "urlopen", "url"),
    (os.path.join("requests", "sessions.py"), "request", "url"),
)
"""Functions that download, each with the argument that holds the address."""

_ACCESS = {"save": "write", "load": "read"}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_CHAINED = 8  # maximum number of examined exceptions in a chain


def file_facts(error: BaseException) -> ResourceFacts | None:
    """Describe the file or download on which ``torch.save`` or ``torch.load`` failed, if any."""
    current: BaseException | None = error
    for _ in range(_MAX_CHAINED):
        if current is None:
            return None
        for frame, _line in traceback.walk_tb(current.__traceback__):
            name, path = frame.f_code.co_name, frame.f_code.co_filename
            if name in _ACCESS and path.endswith(_SERIALIZATION):
                saved = path_of(frame.f_locals.get("f"))
                if saved:
                    return _facts_of(saved, _ACCESS[name])
            for file, function, argument in _DOWNLOADERS:
                if name == function and path.endswith(file):
                    url = _address(frame.f_locals.get(argument))
                    if url:
                        return ResourceFacts(url=url)
        if isinstance(current, OSError) and current.errno in _NO_ROOM:
            return _facts_of(path_of(current.filename), "write")
        current = current.__cause__ or current.__context__
    return None


def _address(url: Any) -> str:
    """Return server and path of a URL or a request."""
    # Imported only here, since it would delay the start.
    from urllib.parse import urlsplit

    url = url if isinstance(url, str) else getattr(url, "full_url", "")
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.hostname}{parts.path}"[:200] if parts.hostname else ""


def _facts_of(path: str, access: str) -> ResourceFacts:
    limit: int | None = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if access != "write" or limit == resource.RLIM_INFINITY:
        limit = None
    found = ResourceFacts(path=path, access=access, limit=limit)
    try:
        room = os.statvfs(os.path.dirname(path) or ".")
        free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        found = replace(found, free=free, total=total)
        return replace(found, size=os.stat(path).st_size)
    except OSError:
        return found


# -- the inner exception, where it says more: a cause, a part of a group, a worker's text

Frames = list[tuple[str, int, str]]
"""Path, line and function of the user's frames, the innermost last."""

_FILE_LINE = re.compile(r'File "([^"\n]+)", line (\d+)')
_HEADLINE = re.compile(r"^[A-Za-z_][\w.]*(?:: |:?$)")
_WORKER_TRACEBACK = "Original Traceback (most recent call last)"


class Raised(NamedTuple):
    """An exception in words."""

    name: str
    message: str
    path: str
    line: int


def unwrapped(error: BaseException) -> tuple[Raised, Raised | None]:
    """Return the exception to report, and the exception that wraps it, if any.

    Report an inner exception if it passed through the user's code and has a message. If a library
    catches an exception and raises another one, the library's message explains more.
    """
    outer = _raised(error)
    current = error
    for _ in range(_MAX_CHAINED):
        part = _first_part(current) or current.__cause__
        if part is None or not frames_of(part) or not text_of(part):
            break
        current = part
    inner = _of_worker(current) or _raised(current)
    # The traceback from a process of a pool arrives as text.
    cause = current.__cause__
    if cause is not None and type(cause).__name__ in ("_RemoteTraceback", "RemoteTraceback"):
        remote = _last_user_line(text_of(cause))
        if remote:
            inner = inner._replace(path=remote[0], line=remote[1])
    return inner, None if inner[:2] == outer[:2] else outer


def text_of(error: object) -> str:
    """Return the text of an object, usually an exception. Never raises."""
    try:
        return str(error)
    except Exception:
        return "(its message could not be formatted)"


def name_of(kind: type[BaseException]) -> str:
    """Return the class name as Python prints it."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def frames_of(error: BaseException) -> Frames:
    """Return the user's frames in the exception's traceback."""
    return [
        (os.path.abspath(frame.f_code.co_filename), number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if user_file(frame.f_code.co_filename)
    ]


def _raised(error: BaseException) -> Raised:
    path, line = "", 0
    if isinstance(error, SyntaxError) and error.filename:
        path, line = os.path.abspath(error.filename), error.lineno or 0
    elif found := frames_of(error):
        path, line = found[-1][:2]
    return Raised(name_of(type(error)), text_of(error), path, line)


def _first_part(error: BaseException) -> BaseException | None:
    """Return the first exception of a group. Groups exist from Python 3.11 on."""
    parts = getattr(error, "exceptions", None)
    is_group = any(each.__name__ == "BaseExceptionGroup" for each in type(error).__mro__)
    if not is_group or not isinstance(parts, tuple) or not parts:
        return None
    return parts[0] if isinstance(parts[0], BaseException) else None


def _of_worker(error: BaseException) -> Raised | None:
    """Return the exception of a DataLoader worker, which the rank raises again with its text."""
    _, head, rest = text_of(error).partition(_WORKER_TRACEBACK)
    if not head:
        return None
    lines = rest.splitlines()
    last = max((n for n, line in enumerate(lines) if _FILE_LINE.search(line)), default=-1)
    at = next((n for n in range(last + 1, len(lines)) if _HEADLINE.match(lines[n])), None)
    if at is None:
        return None
    name, _, message = "\n".join(lines[at:]).strip().partition(": ")
    path, line = _last_user_line(rest) or _raised(error)[2:]
    return Raised(name.rstrip(":"), message, path, line)


def _last_user_line(printed: str) -> tuple[str, int] | None:
    found = [each for each in _FILE_LINE.findall(printed) if user_file(each[0])]
    return (os.path.abspath(found[-1][0]), int(found[-1][1])) if found else None


# -- records of the ends of processes

_MESSAGE = 4_000
_LINE = 1_500
_TRACEBACK = 60_000

_MAX_SAME_NS = 1_000_000_000  # nanoseconds within which an equal id means the same exception
_MAX_UNTIL_EXIT_NS = 60_000_000_000  # nanoseconds from a printed exception to the exit it explains
_NO_FAILURE = ("SystemExit", "GeneratorExit", "Exit", "Abort")
"""Exceptions by which a script, or click, exits on purpose."""

_format_exception = traceback.format_exception
owner = os.getpid()
"""The process that loaded the probe. Forked children, like multiprocessing's, end differently."""

_shown: tuple[int, ErrorRecord] | None = None
"""The last printed exception, with its id. It may be the reason for an exit."""


@shield.shielded
def uncaught(error: BaseException) -> None:
    """Record an exception that ends this process."""
    state = rank.current()
    if state is not None and state.has_error:
        return
    record = describe(error)
    if state is None:
        write_stray(record)
        return
    state.has_error = True
    record = _placed(record, error)
    events.emit(Observer.rank_fails, error)
    rank.write_now(record)


def unseen() -> None:
    """Record the exception that ended the main thread if an excepthook of the job hid it."""
    # The interpreter stores it here before it calls any hook.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(last, BaseException):
        uncaught(last)


@shield.shielded
def thread_failed(thread: Thread, error: BaseException | None) -> None:
    """Record an exception of another thread, which the main thread does not see."""
    state = rank.current()
    if state is not None and error is not None and not isinstance(error, SystemExit):
        record = _placed(_in_words(error), error)
        state.recorder.add(ThreadErrorRecord(thread=thread.name, **_values(record)))


def _placed(record: ErrorRecord, error: BaseException) -> ErrorRecord:
    """Add the activity of this process, if it is a rank."""
    state = rank.current()
    if state is None:
        return record
    tracker = state.tracker
    record = replace(record, step=tracker.steps, armed=tracker.armed)
    if tracker.failed is not None and tracker.failed[0] == id(error):
        return replace(record, phase=Phase(tracker.failed[1]).label, collective=tracker.failed[2])
    code = tracker.optimizer_code
    frames = traceback.walk_tb(error.__traceback__)
    if code is not None and any(frame.f_code is code for frame, _ in frames):
        return replace(record, phase=Phase.OPTIMIZER.label)
    return record


def describe(error: BaseException) -> ErrorRecord:
    """Make the record of an exception, with the system's facts about its file or port."""
    record = _in_words(error)
    try:
        file = file_facts(error) or job_launch.port_facts(text_of(error))
    except Exception as fault:
        shield.fault("file_facts", fault)
        return record
    return replace(record, file=file)


def _in_words(error: BaseException) -> ErrorRecord:
    # Printing a traceback opens source files.
    read = files.read_last()
    raised, outer = unwrapped(error)
    formatted = "".join(_format_exception(type(error), error, error.__traceback__))
    return ErrorRecord(
        time=time.time_ns(),
        pid=os.getpid(),
        exception=raised.name,
        message=_shortened(raised.message),
        path=raised.path,
        line=raised.line,
        user_frames=tuple(CodeFrame(*frame) for frame in frames_of(error)),
        traceback=formatted[-_TRACEBACK:],
        read=read,
        outer=outer
        and OuterError(
            exception=outer.name,
            message=_shortened(outer.message),
            path=outer.path,
            line=outer.line,
        ),
    )


def _shortened(message: str) -> str:
    """Shorten a long message. Keep the beginning of each of its lines."""
    if len(message) <= _MESSAGE:
        return message
    # load_state_dict lists missing keys in one line, and unexpected ones in the next.
    return "\n".join(line[:_LINE] for line in message[: 1 << 20].splitlines()[:100])[:_MESSAGE]


def _values(record: ErrorRecord) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(record)}


def write_stray(record: EndOfProcess) -> None:
    """Write a record of a process that is not, or not yet, a rank into a separate file."""
    path = os.path.join(rank.run_directory(), f"process-{os.getpid()}.jsonl")
    record = replace(
        record,
        rank=rank.environment_int("RANK"),
        restart=rank.environment_int("TORCHELASTIC_RESTART_COUNT") or 0,
        # torchrun makes its workers session leaders. A helper program of a worker is not one. The
        # job's own command is not one if it keeps its terminal.
        leads_session=os.getsid(0) == os.getpid() or watch.is_command(),
        argv=tuple(getattr(sys, "argv", [])),
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, encode(record))
    finally:
        os.close(descriptor)


# -- exceptions that were printed, and do not end a process by themselves


@shield.shielded
def printed(*args: Any, **kwargs: Any) -> None:
    """Remember a printed exception as a record, because the exception keeps its frames alive."""
    global _shown
    error = kwargs.get("value", args[1] if len(args) > 1 else args[0] if args else None)
    if not isinstance(error, BaseException) or not _is_failure(error):
        return
    if os.getpid() != owner and rank.current() is None:
        return
    if _shown is None or _shown[0] != id(error) or time.time_ns() - _shown[1].time > _MAX_SAME_NS:
        _shown = id(error), _placed(_in_words(error), error)


MAX_PENDING = 16  # maximum number of recorded exceptions during which collectives are called


@shield.shielded
def collective_called(name: str) -> None:
    """Record the exception that is being handled when a collective is called."""
    error, state = sys.exc_info()[1], rank.current()
    if state is None or error is None or not _is_failure(error) or not state.tracker.is_here():
        return
    site = caller()
    once = ("pending", type(error).__name__, site.path, site.line)
    if isinstance(error, StopIteration) or not state.may_add(PendingErrorRecord, MAX_PENDING, once):
        return
    values = {**_values(_placed(_in_words(error), error)), "collective": name}
    # Native code may end the process during that call.
    state.recorder.add_now(PendingErrorRecord(**values, called_at=site.location))


def _is_failure(error: BaseException) -> bool:
    return type(error).__name__ not in _NO_FAILURE


def behind() -> ErrorRecord | None:
    """Return the exception that causes an exit: one being handled, or just printed.

    An exception after which a step continued does not count.
    """
    error = sys.exc_info()[1]
    if error is not None and _is_failure(error):
        return _placed(describe(error), error)
    if _shown is None or time.time_ns() - _shown[1].time > _MAX_UNTIL_EXIT_NS:
        return None
    return _shown[1] if rank.current() is None else _shown_in_step()


def _shown_in_step() -> ErrorRecord | None:
    state = rank.current()
    same = state is not None and _shown is not None and _shown[1].step == state.tracker.steps
    return _shown[1] if same and _shown is not None else None


def shown_last() -> ShownErrorRecord | None:
    """Return the exception that was printed in the rank's last step."""
    record = _shown_in_step()
    return None if record is None else ShownErrorRecord(**_values(record))


def exit_record(
    how: str, status: int, site: Site, said: str | None = None, refused: str = ""
) -> ExitRecord:
    """Make the record of a call that ends the process."""
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
    """Return the record of the exception behind an exit, or of the exit if there is none."""
    return call if reason is None else replace(reason, left=call)


def status_of(code: object) -> int:
    """Return the status with which ``sys.exit(code)`` ends a process."""
    return 0 if code is None else code if isinstance(code, int) else 1
