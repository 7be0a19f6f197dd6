"""What an exception that ended a rank says: whether a lost peer is its cause, and in short."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddpdoctor.run.records.process import (
    ErrorRecord,
    ExitRecord,
    OuterError,
    ShownErrorRecord,
    ThreadErrorRecord,
)

_VICTIM = re.compile(
    r"Connection closed by peer"
    r"|Connection reset by peer"
    r"|Broken pipe"
    r"|Timed out waiting \d+ms for (?:recv|send)"
    r"|Gloo connectFullMesh failed"
    r"|Socket Timeout|wait timeout after \d+ms|Socket closed"
    r"|failed to recv, got 0 bytes|should dump"
    r"|NCCL communicator (?:was|is) aborted|remote process exited|ncclRemoteError"
    r"|Watchdog caught collective operation timeout|NCCL operation timed out"
    r"|Application timeout caused pair closure",
    re.IGNORECASE,
)
"""What a rank says whose peers are gone: the consequence of a failure elsewhere."""

_COMMON = re.compile(r"Connection reset by peer|Broken pipe|Socket (?:Timeout|closed)", re.I)
"""What a database or a download says, too."""

_OF_TORCH = re.compile(r"gloo|nccl|TCPStore|c10d|\[[^\]]*\.(?:cc|cpp|h):\d+\]", re.IGNORECASE)
_THROUGH_TORCH = re.compile(r"[/\\]torch[/\\](?:distributed|autograd|_tensor|nn[/\\]parallel)")

_WRAPPERS = (
    "ChildFailedError",
    "ProcessRaisedException",
    "ProcessExitedException",
    "CalledProcessError",
    "SignalException",
)
"""Exceptions of launchers: they only say that a child failed."""

_NOISE = re.compile(
    r"\x1b\[[\d;]*m|\[/[^\]]*\.(?:cc|cpp|h):\d+\]\s*|\s*\[[\da-fA-F.:]+\](?::\d+)?|^\[[^\]]*\.cpp:\d+\]\s*"
)

_RAISED = re.compile(r"^(?:.*:)? *raise\b[^\n]*\n(?: *[~^]+ *\n)?[^\s:]+\s*\Z", re.MULTILINE)
"""The end of a traceback whose innermost line raises the exception."""

_IN_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+)")


def is_consequence(record: ErrorRecord) -> bool:
    """Whether a rank only failed because another had, or because it was asked to stop."""
    name = record.exception
    wrapper = name.rpartition(".")[2] in _WRAPPERS
    return wrapper or is_sigint(name, record.traceback) or _lost_peer(record)


def is_sigint(exception: str, traceback: str) -> bool:
    """Whether an exception is SIGINT, as Python passes that on, and not raised by the script."""
    return exception == "KeyboardInterrupt" and not _RAISED.search(traceback)


def _lost_peer(record: ErrorRecord) -> bool:
    """Whether torch says that a peer is gone; the same words of a download are its own failure."""
    name, message = record.exception, record.message
    if name != "RuntimeError" and not name.startswith("torch."):
        return False
    found = _VICTIM.search(message)
    if found is None or not _COMMON.fullmatch(found[0]):
        return found is not None
    trace = record.traceback
    return bool(_OF_TORCH.search(message) or not trace or _THROUGH_TORCH.search(trace))


def _clean(message: str) -> str:
    """A message without the C++ source lines and socket addresses that gloo and c10d put into it.

    The addresses are wrong besides: gloo prints ports byte-swapped.
    """
    return _NOISE.sub("", message).strip()


def in_short(error: ErrorRecord | OuterError) -> str:
    """An exception with the first line of its message."""
    name = error.exception or "an exception"
    first = next((line for line in error.message.splitlines() if line.strip()), "")
    return f"{name}: {_clean(first)}" if first else name


def notes_of(record: ErrorRecord) -> Iterator[str]:
    """What became of an exception before it ended the process."""
    if isinstance(record, ThreadErrorRecord) and record.thread:
        yield f"it ended the thread {record.thread[:60]!r}, which the main one waited for"
    outer, left = record.outer, record.left
    if outer is not None:
        place = f" at {outer.location}" if outer.location is not None else ""
        worker = _IN_WORKER.match(outer.message)
        if worker is not None:
            yield f"in {worker[1]}, whose batch was awaited{place}"
        else:
            yield f"it was raised again as {in_short(outer)[:160]}{place}"
    if left is not None:
        place = f" at {left.location}" if left.location is not None else ""
        yield f"the script caught it and ended itself by {exit_call(left)}{place}"
    elif isinstance(record, ShownErrorRecord):
        yield "the script caught it, printed it, and ended itself"


def exit_call(record: ExitRecord) -> str:
    """The call by which a process ended itself: ``sys.exit(3)``."""
    return f"{record.how}({record.status if record.said is None else repr(record.said)})"
