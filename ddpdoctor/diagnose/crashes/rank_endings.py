"""Find how each process of a job ended, and which one failed first by itself."""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ddpdoctor.core.opening import whole
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.collectives.recorded_calls import UNEQUAL
from ddpdoctor.diagnose.source_files import location
from ddpdoctor.run.records.process import (
    EndRecord,
    ErrorRecord,
    ExitRecord,
    OuterError,
    ReadFile,
    ResourceFacts,
    ShownErrorRecord,
    ThreadErrorRecord,
)
from ddpdoctor.run.records.training import SiteRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase

# -- exit statuses, seen by the supervisor or printed by the launcher

_TORCHRUN_EXIT = re.compile(r"exitcode\s*: (-?\d+)\s*\(pid: (\d+)\)")
_TORCHRUN_LOG = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")

_SPAWNED = re.compile(r"process \d+ terminated with (?:signal (SIG[A-Z]+)|exit code (\d+))")
"""The message of ``torch.multiprocessing.spawn`` about its first failed process."""

_STOPPED = re.compile(r"(?:Terminating|Sending) process (\d+) (?:via|closing) signal (SIG[A-Z]+)")
"""Messages of ``spawn`` and torchrun about ending the other processes."""


def exit_status(rank: Rank, statuses: dict[int, int]) -> int | None:
    """Return the exit status of a rank, negative for a signal. None if unknown.

    ``statuses`` holds those that its launcher printed, by pid.
    """
    if rank.exit is not None and rank.exit.status is not None:
        return rank.exit.status
    # On another node, the same pid belongs to another process.
    status = None if rank.elsewhere else rank.status
    printed = statuses.get(status.pid) if status is not None else None
    if printed is None and rank.exit is not None and rank.exit.oom:
        return -signal.SIGKILL
    return printed


def printed_statuses(stderr: str) -> dict[int, int]:
    """Return the exit statuses that torchrun printed, by pid."""
    return {
        int(pid): int(status)
        for pattern in (_TORCHRUN_EXIT, _TORCHRUN_LOG)
        for status, pid in pattern.findall(stderr)
    }


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9, and ``signal 99`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _spawned_statuses(
    run: Run, ranks: tuple[Rank, ...], statuses: dict[int, int]
) -> dict[int, int]:
    """Return the exit statuses, by pid, of ranks whose parent reaped them unseen."""
    unknown = {
        rank.status.pid: rank.exit.time
        for rank in ranks
        if rank.exit is not None
        and rank.status is not None
        and not rank.elsewhere
        and exit_status(rank, statuses) is None
        and not _recorded_end(rank)
    }
    stopped = {
        int(pid): _number(name)
        for pid, name in _STOPPED.findall(run.stderr)
        if int(pid) in unknown and _number(name)
    }
    said = _SPAWNED.search(run.stderr)
    first = min(unknown.keys() - stopped.keys(), key=lambda pid: unknown[pid], default=None)
    status = _number(said[1]) or int(said[2] or 0) if said is not None else 0
    return {**stopped, **({first: status} if first is not None and status else {})}


def _number(name: str | None) -> int:
    """Return the exit status of a process ended by a named signal. 0 for an unknown name."""
    number = getattr(signal, name, None) if name else None
    return -int(number) if isinstance(number, signal.Signals) else 0


def _recorded_end(rank: Rank) -> bool:
    """Return whether a rank recorded how it ended."""
    return any(map(rank.records.of, (EndRecord, ErrorRecord, ExitRecord)))


# -- exceptions: whether a lost peer is the cause, and short descriptions

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
"""Messages of a rank that lost its peers because of a failure elsewhere."""

TIMED_OUT = re.compile(
    r"Timed out waiting (\d+)ms for (?:recv|send)|wait timeout after (\d+)ms|Timeout\(ms\)=(\d+)"
)
"""Messages of a collective that exceeded its timeout, in milliseconds."""

_COMMON = re.compile(r"Connection reset by peer|Broken pipe|Socket (?:Timeout|closed)", re.I)
"""Messages that a database or a download may also print."""

_OF_TORCH = re.compile(r"gloo|nccl|TCPStore|c10d|\[[^\]]*\.(?:cc|cpp|h):\d+\]", re.IGNORECASE)
_THROUGH_TORCH = re.compile(r"[/\\]torch[/\\](?:distributed|autograd|_tensor|nn[/\\]parallel)")

_WRAPPERS = (
    "ChildFailedError",
    "ProcessRaisedException",
    "ProcessExitedException",
    "CalledProcessError",
    "SignalException",
)
"""Exceptions of launchers, which only report that a child failed."""

_NOISE = re.compile(
    r"\x1b\[[\d;]*m|\[/[^\]]*\.(?:cc|cpp|h):\d+\]\s*|\s*\[[\da-fA-F.:]+\](?::\d+)?|^\[[^\]]*\.cpp:\d+\]\s*"
)

_RAISED = re.compile(r"^(?:.*:)? *raise\b[^\n]*\n(?: *[~^]+ *\n)?[^\s:]+\s*\Z", re.MULTILINE)
"""The end of a traceback whose innermost line raises the exception."""

_IN_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+)")


def is_consequence(record: ErrorRecord) -> bool:
    """Return whether a rank failed only after another one, or because it was asked to stop."""
    name = record.exception
    wrapper = name.rpartition(".")[2] in _WRAPPERS
    return wrapper or _is_sigint(name, record.traceback) or _lost_peer(record)


def _is_sigint(exception: str, traceback: str) -> bool:
    """Return whether Python raised an exception for SIGINT, rather than the script."""
    return exception == "KeyboardInterrupt" and not _RAISED.search(traceback)


def _lost_peer(record: ErrorRecord) -> bool:
    """Return whether torch reports a lost peer. A download may fail with the same message."""
    name, message = record.exception, record.message
    if name != "RuntimeError" and not name.startswith("torch."):
        return False
    found = _VICTIM.search(message)
    if found is None or not _COMMON.fullmatch(found[0]):
        return found is not None
    trace = record.traceback
    return bool(_OF_TORCH.search(message) or not trace or _THROUGH_TORCH.search(trace))


def in_short(error: ErrorRecord | OuterError) -> str:
    """Return an exception with the first line of its message, without C++ source lines.

    Leave out gloo's socket addresses, too: it prints ports byte-swapped.
    """
    name = error.exception or "an exception"
    first = next((line for line in error.message.splitlines() if line.strip()), "")
    return f"{name}: {_NOISE.sub('', first).strip()}" if first else name


def _notes_of(record: ErrorRecord) -> Iterator[str]:
    """Describe what happened between an exception and the end of the process."""
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
        yield f"the script caught it and ended itself by {_exit_text(left)}{place}"
    elif isinstance(record, ShownErrorRecord):
        yield "the script caught it, printed it, and ended itself"


def _exit_text(record: ExitRecord) -> str:
    """Return the call by which a process ended itself: ``sys.exit(3)``."""
    return f"{record.how}({record.status if record.said is None else repr(record.said)})"


# -- endings of processes

Kind = Literal["exception", "exit", "signal", "abort-at-exit"]

PATIENCE = 3_000_000_000
"""Nanoseconds in one phase after which a rank of a running job is assumed to wait for others."""

_MISPAIRED = re.compile(
    r"op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size"
    rf"|Detected mismatch between collectives on ranks|{UNEQUAL}",
    re.IGNORECASE,
)
"""Messages about a collective that paired with a different one, or one of a different size."""

_NATIVE_VICTIM = re.compile(
    r"Watchdog caught collective operation timeout"
    r"|To avoid data inconsistency, we are taking the entire process down"
    r"|Aborting process on rank \d+ due to (?:timeout|[^\n]{0,400}remote process exited)"
)
"""Messages of NCCL's watchdog before it aborts a rank that lost a peer.

The last one is for torch 2.15. Its number is the rank within its group.
"""

_OF_RANK = re.compile(r"\[rank(\d+)\]:")
_HEAD = 2_000  # Number of characters before such a message to search for the rank

_FATAL = re.compile(r"Fatal Python error: ([A-Z][a-z ]+)")
_FATAL_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
"""The text that ``faulthandler`` writes for each signal."""

_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that torchrun sends to the survivors of a failure."""

_STARVED = ("Empty", "TimeoutError", "BrokenBarrierError")
"""Exceptions that a main thread raises if another thread never answers."""

NOTHING = ResourceFacts()  # The facts about an exception without a file


@dataclass(frozen=True)
class Ending:
    """The end of one process."""

    rank: int | None  # Its rank; None for a process that never reported one
    time: int  # Unix nanoseconds
    kind: Kind  # ``abort-at-exit`` is a native abort after the script had ended
    victim: bool  # Whether it failed only because another one did
    text: str  # The exception with its message, the signal, or the exit call
    where: str = ""  # Its activity at that time, in words: ``step 12, backward``
    location: Location | None = None
    traceback: str = ""
    status: int | None = None  # The exit status (negative: a signal), if known
    message: str = ""  # The whole message of the exception
    oom: str = ""
    """``kernel`` or ``cgroup``, whichever reported an out-of-memory kill. Otherwise empty."""
    file: ResourceFacts = NOTHING  # Facts about the file that an exception is about
    read: tuple[ReadFile, ...] = ()  # The files that it had last opened for reading, newest first
    last_seen: Location | None = None
    """The last line of the user's code that the probe saw, if ``location`` is unknown."""
    initialized: bool = True  # Whether it had joined the process group
    notes: tuple[str, ...] = ()
    """The events between the exception and the end of the process, a sentence each."""

    @property
    def name(self) -> str:
        """The process, as the subject of a sentence."""
        return f"rank {self.rank}" if self.rank is not None else "a process of the job"

    @property
    def stopped(self) -> bool:
        """Whether a signal that asks a process to end ended it."""
        return self.kind == "signal" and self.status is not None and -self.status in _ASKED

    @property
    def interrupted(self) -> bool:
        """Whether SIGINT ended it, for which Python raises an exception."""
        return self.kind == "exception" and _is_sigint(self.text, self.traceback)

    @property
    def printed(self) -> str:
        """The exception with its whole message, as Python prints it."""
        return f"{self.text.partition(': ')[0]}: {self.message}"


def endings(run: Run, restart: int) -> list[Ending]:
    """Return the failed processes of one attempt, earliest first.

    Leave out normal ends, and ends after the user asked the job to stop.
    """
    statuses = printed_statuses(run.stderr)
    aborted = _aborted(run.every_stderr)
    ranks = run.attempt(restart)
    statuses |= _spawned_statuses(run, ranks, statuses)
    ends = (_rank_ending(rank, statuses, bool(run.exit_status), aborted) for rank in ranks)
    found = [each for each in ends if each is not None]
    found += _unseen_endings(run, ranks, statuses, found)
    found += _stray_endings(run, restart, {rank.rank for rank in ranks})
    limit = run.stopped_at
    found = sorted(
        (each for each in found if limit is None or each.time < limit), key=lambda each: each.time
    )
    if run.exit_status is not None and limit is None:
        stops = [each for each in found if each.interrupted]
        # Ctrl-C reaches all ranks, so a signal to a single rank is a cause.
        if len(stops) == 1 and len(ranks) > 1 and stops[0] is found[0]:
            found[0] = replace(stops[0], victim=False)
        if run.world_size == 1 and all(each.victim for each in found):
            # A single rank has no peer to lose.
            found = [replace(each, victim=False) for each in found]
    return found


@functools.lru_cache(maxsize=2)
def _aborted(stderr: str) -> frozenset[int]:
    """Return the ranks that NCCL's watchdog aborted, according to its messages."""
    found = set()
    for words in _NATIVE_VICTIM.finditer(stderr):
        begin = stderr.rfind("\n", max(0, words.start() - _HEAD), words.start()) + 1
        head = _OF_RANK.search(stderr, max(begin, words.start() - _HEAD), words.start())
        if head is not None:
            found.add(whole(head[1], -1))
    return frozenset(found)


def first_failure(run: Run, restart: int) -> Ending | None:
    """Return the cause of an attempt's failure: the earliest end that is not a consequence.

    A rank's failure takes precedence over that of another process, such as a helper.
    """
    causes = [
        each for each in endings(run, restart) if not each.victim and each.kind != "abort-at-exit"
    ]
    of_ranks = [each for each in causes if each.rank is not None]
    return next(iter(of_ranks or (causes if run.exit_status else ())), None)


def mispaired(run: Run, cause: Ending) -> bool:
    """Return whether a rank failed in a collective paired with one of another kind or size."""
    if cause.kind == "exception":
        return bool(_MISPAIRED.search(cause.text) or _MISPAIRED.search(cause.traceback))
    aborted = cause.kind == "signal" and cause.status == -signal.SIGABRT
    return aborted and bool(_MISPAIRED.search(run.every_stderr))


def _rank_ending(
    rank: Rank, statuses: dict[int, int], job_failed: bool, aborted: frozenset[int]
) -> Ending | None:
    status = exit_status(rank, statuses)
    if status == 0 or rank.status is None:
        # The recorded exception was caught or did not matter.
        return None
    error = rank.records.first(ErrorRecord)
    if error is not None:
        return _exception(rank.rank, _of_thread(rank, error) or error, status)
    call = next((each for each in rank.records.of(ExitRecord) if each.status), None)
    if call is not None and (status == call.status or (status is None and job_failed)):
        thread = _of_thread(rank, call)
        return _exit_ending(rank.rank, call) if thread is None else _exception(rank.rank, thread)
    if status is None:
        return None
    # The time of an unobserved end is that of the last sign of life.
    ended = rank.exit
    when = ended.time if ended is not None and ended.status is not None else rank.status.since
    if status < 0:
        return _signal_ending(rank, status, when, aborted)
    shown = rank.records.first(ShownErrorRecord)
    if shown is not None:
        return _exception(rank.rank, shown, status)
    text = f"exit status {status} without an exception"
    return Ending(rank.rank, when, "exit", False, text, _where(rank), _site(rank), status=status)


def _signal_ending(rank: Rank, status: int, when: int, aborted: frozenset[int]) -> Ending | None:
    """Return the end of a rank by a signal. None if it had already ended normally.

    ``status`` is the negative signal number. NCCL's watchdog ended the ``aborted`` ranks.
    """
    name = signal_name(-status)
    asked = -status in _ASKED
    if rank.ended is not None:
        # A launcher also stops a rank that has finished but got no core yet to exit.
        if asked:
            return None
        return Ending(rank.rank, when, "abort-at-exit", False, name, status=status)
    return Ending(
        rank=rank.rank,
        time=when,
        kind="signal",
        victim=asked or (-status == signal.SIGABRT and rank.rank in aborted),
        text=name,
        where=_where(rank),
        location=_site(rank),
        status=status,
        oom=rank.exit.oom if rank.exit is not None else "",
        last_seen=_last_line(rank),
    )


def _unseen_endings(
    run: Run, ranks: tuple[Rank, ...], statuses: dict[int, int], found: list[Ending]
) -> Iterator[Ending]:
    """Yield ranks of a running job that ended first and reported nothing.

    Their launcher reaped the exit status unseen. It prints the status only when the others have
    ended as well, and they may hang.
    """
    if run.exit_status is not None or all(rank.exit is not None for rank in ranks):
        return
    for rank in ranks:
        if (
            rank.exit is None
            or rank.status is None
            or _recorded_end(rank)
            or exit_status(rank, statuses) is not None
        ):
            continue
        when = rank.exit.time
        if any(each.time <= when for each in found):
            continue
        native = _FATAL.search(rank.fault)
        number = _FATAL_SIGNALS.get(native[1]) if native is not None else None
        text = "a signal, most likely SIGKILL (its exit status was not seen)"
        yield Ending(
            rank=rank.rank,
            time=when,
            kind="signal",
            victim=False,
            text=text if number is None else signal_name(number),
            where=_where(rank),
            location=_site(rank),
            status=None if number is None else -number,
            last_seen=_last_line(rank),
        )


def _stray_endings(run: Run, restart: int, joined: set[int]) -> Iterator[Ending]:
    for record in run.strays:
        if not isinstance(record, (ErrorRecord, ExitRecord)):
            continue
        if record.restart != restart or record.rank in joined:
            continue
        worker = record.rank is not None and record.leads_session
        if not run.exit_status and not (worker and run.exit_status is None):
            # A helper program of a healthy job may fail, and a caught `sys.exit` is recorded, too.
            # They explain a failure only once the job is known to have failed.
            continue
        if isinstance(record, ErrorRecord):
            yield _exception(record.rank, record, None, initialized=False)
        elif run.exit_status:
            yield _exit_ending(record.rank, record, initialized=False)


def _exception(
    rank: int | None, record: ErrorRecord, status: int | None = None, initialized: bool = True
) -> Ending:
    return Ending(
        rank=rank,
        time=record.time,
        kind="exception",
        victim=is_consequence(record),
        text=in_short(record),
        where=_place(record.step, record.collective or record.phase),
        location=record.location,
        traceback=record.traceback,
        message=record.message,
        status=status,
        file=record.file or NOTHING,
        read=record.read,
        initialized=initialized,
        notes=tuple(_notes_of(record)),
    )


def _of_thread(rank: Rank, end: ErrorRecord | ExitRecord) -> ThreadErrorRecord | None:
    """Return the exception of a thread, if the main thread failed waiting for its work."""
    if isinstance(end, ErrorRecord) and end.exception.rpartition(".")[2] not in _STARVED:
        return None
    failed = [each for each in rank.records.of(ThreadErrorRecord) if each.time < end.time]
    return failed[-1] if failed else None


def _exit_ending(rank: int | None, record: ExitRecord, initialized: bool = True) -> Ending:
    return Ending(
        rank=rank,
        time=record.time,
        kind="exit",
        victim=False,
        text=_exit_text(record),
        where=_place(record.step, record.phase),
        location=record.location,
        message=record.refused,
        status=record.status,
        initialized=initialized,
    )


def _place(step: object, phase: object) -> str:
    parts = [f"step {step}"] if step is not None else []
    return ", ".join([*parts, str(phase)] if phase and phase != "other" else parts)


def _where(rank: Rank) -> str:
    status = rank.status
    if status is None:
        return ""
    return _place(status.step, None if status.phase is Phase.OTHER else status.phase.label)


def _site(rank: Rank) -> Location | None:
    """Return the line of the current phase. None between phases."""
    if rank.status is not None and rank.status.phase in (Phase.OTHER, Phase.STARTING):
        return None
    return _last_line(rank)


def _last_line(rank: Rank) -> Location | None:
    """Return the last line of the user's code that the probe recorded."""
    return location(rank.status.site) if rank.status is not None else None


def last_phase(rank: Rank) -> Phase | None:
    """Return the phase that a rank is in, or was in when it ended. None without a status page.

    An exception ends a phase at once. A rank without a core may be ended before its page shows the
    phase, or before it records the exception. In that case it had not completed the step of its
    newest backward.
    """
    status = rank.status
    if status is None or status.phase is not Phase.OTHER or rank.exit is None:
        return None if status is None else status.phase
    error = rank.records.first(ErrorRecord)
    if error is not None or rank.ended is not None:
        phases = (each for each in Phase if error is not None and each.label == error.phase)
        return next(phases, status.phase)
    places = {
        str(each.location) for each in rank.records.of(SiteRecord) if each.phase == "backward"
    }
    begun = status.site in places and status.reduced == status.armed
    return Phase.BACKWARD if begun else Phase.OTHER
