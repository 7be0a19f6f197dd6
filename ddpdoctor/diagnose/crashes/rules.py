"""Rules for crashes (DDP9xx): the first cause of a failed job, not its consequences.

One function yields the findings of all these rules and of the table of known failures
(`ddpdoctor.failures`), so that each end of an attempt is classified once.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import replace

from ddpdoctor.core.finding import RULES, Finding, Rule, Severity, rule
from ddpdoctor.core.opening import whole
from ddpdoctor.core.relations import ABORT, END, LOST, MISPAIRED, ended_by
from ddpdoctor.core.user_code import Location, user_file
from ddpdoctor.diagnose import APART, STANDSTILLS
from ddpdoctor.diagnose.crashes.attempts import (
    Attempt,
    attempts,
    known_failure,
    known_finding,
    moment,
    raised_before_a_wait,
    truncated,
)
from ddpdoctor.diagnose.crashes.out_of_memory import host_facts
from ddpdoctor.diagnose.crashes.rank_endings import Ending
from ddpdoctor.diagnose.crashes.resource_errors import path_fault
from ddpdoctor.failures import advice, recognise
from ddpdoctor.failures.table import TABLE
from ddpdoctor.run.snapshot import Run

_EXPLAINED_BY = dict.fromkeys(
    sorted({*APART, *STANDSTILLS, "DDP109", "DDP305", "DDP707", "DDP801"}), ended_by
)
"""The rules whose faults may have ended an attempt."""

_NATIVE = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_FAULT_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def crashes(run: Run) -> Iterator[Finding]:
    """Classify the end of each attempt."""
    pending = raised_before_a_wait(run)
    if pending is not None:
        yield pending
    for attempt in attempts(run):
        if attempt.last and pending is not None:
            continue
        cause, known = attempt.cause, known_failure(attempt)
        if known is not None:
            found = known_finding(attempt, known)
        elif cause is None:
            found = _lost_peers(attempt)
        elif cause.kind == "exception":
            found = _exception(attempt, cause)
        elif cause.kind == "signal":
            found = _signal(attempt, cause)
        else:
            found = _exit(attempt, cause)
        if found is not None:
            yield found
        for each in attempt.endings if attempt.last else ():
            if each.kind == "abort-at-exit" and each.rank is not None:
                yield Finding(
                    code="DDP906",
                    severity=Severity.INFO,
                    message=f"{each.name} finished its script and then died of {each.text} at "
                    "exit; training is not affected",
                    ranks=(each.rank,),
                    fix="Delete the DDP module and the optimizer, call gc.collect(), and only then "
                    "call destroy_process_group().",
                )


def _exception(attempt: Attempt, cause: Ending) -> Finding | None:
    peers = attempt.run.has_peers
    if cause.interrupted:
        return attempt.finding(
            "DDP902",
            cause,
            f"{cause.name}{' alone' * peers} was interrupted by SIGINT{moment(cause)}",
            "Find out who sent it: Ctrl-C in a terminal reaches all ranks. `kill` the "
            "launcher to stop the job, not one of its ranks."
            if peers
            else "Find out who sent it: a person, a scheduler, or the script itself. `kill` "
            "the launcher to stop the job.",
        )
    if attempt.explained:
        return None
    path = path_fault(attempt.run, cause) if attempt.last else None
    fix = "Fix this exception first; failures of other ranks follow from it."
    if not peers:
        fix = "Fix this exception."
    fix = f"{advice.of_text(cause.text, cause.traceback)} {fix}".strip()
    return attempt.finding(
        "DDP901",
        cause,
        f"{cause.name} raised {truncated(cause.text, 200)}{moment(cause)}"
        + (path.said if path is not None else ""),
        path.fix if path is not None else fix,
    )


def _signal(attempt: Attempt, cause: Ending) -> Finding:
    if cause.oom:
        kernel = cause.oom == "kernel"
        source = (
            "the kernel's log names this process"
            if kernel
            else "the memory cgroup counted an out-of-memory kill at that moment"
        )
        return attempt.finding(
            "DDP903",
            cause,
            f"{cause.name} was {'' if kernel else 'very likely '}killed by the out-of-memory "
            f"killer{moment(cause)}",
            "Host memory ran out: use fewer DataLoader workers, load less per rank, or raise the "
            "job's memory limit.",
            evidence=(source, *(host_facts(attempt.run, cause) if attempt.last else ())),
        )
    if -(cause.status or 0) not in _NATIVE:
        return attempt.finding(
            "DDP902",
            cause,
            f"{cause.name} was killed by {cause.text}{moment(cause)}",
            "Find out who sent it: a scheduler's limit, a person, or the kernel (see dmesg).",
        )
    ranks = attempt.run.attempt(attempt.restart)
    fault = next((rank.fault for rank in ranks if rank.rank == cause.rank), "")
    start = fault.find("Fatal Python error")
    stack = fault[start:][:8000] if start >= 0 else ""
    return attempt.finding(
        "DDP904",
        cause,
        f"{cause.name} crashed in native code with {cause.text}{moment(cause)}",
        "The line named entered the native code that crashed; suspect the extension or library "
        "it calls.",
        location=_fault_location(stack),
        traceback=stack,
    )


def _fault_location(stack: str) -> Location | None:
    """Return the innermost line of the user's code in the thread that crashed."""
    current = stack.partition("Current thread")[2].split("\n\n")[0]
    for path, line in _FAULT_FRAME.findall(current):
        if user_file(path):
            return Location(path, whole(line))
    return None


def _exit(attempt: Attempt, cause: Ending) -> Finding:
    message = f"{cause.name} ended itself: {truncated(cause.text, 200)}{moment(cause)}"
    fix = "Raise an exception that says why."
    if cause.message:
        message = f"{cause.name} refused the script's options: {truncated(cause.message, 200)}"
        fix = "Give the script the options that it takes, after `--`."
    elif cause.status == 2 and not cause.initialized:
        fix = "The script refused its options: see its message above."
    elif attempt.run.has_peers:
        fix = "Raise an exception that says why, or decide to leave on all ranks together."
    return attempt.finding("DDP905", cause, message, fix)


def _lost_peers(attempt: Attempt) -> Finding | None:
    run = attempt.run
    victims = [
        each
        for each in attempt.endings
        if each.victim
        and each.rank is not None
        and each.kind == "exception"
        and not each.interrupted
    ]
    if not run.exit_status or run.world_size == 1 or not attempt.last or not victims:
        return None
    first = victims[0]
    found = Finding(
        code="DDP907",
        severity=Severity.ERROR,
        message=f"{first.name} likely lost a peer{moment(first)}: {truncated(first.text)}",
        ranks=() if first.rank is None else (first.rank,),
        location=first.location,
        evidence=(
            "no rank of this node failed by itself",
            *(f"{each.name}: {truncated(each.text)}" for each in victims[1:4]),
        ),
        fix="Look for the cause on the other ranks or nodes: a rank that ended, hangs, or never "
        "called this collective.",
        traceback=first.traceback,
        subjects=frozenset((f"{END}{attempt.restart + 1}", MISPAIRED, ABORT, LOST)),
    )
    failure, groups = recognise(first.printed) or (None, {})
    absent = groups.get("rank", "")
    if failure is None or not absent:
        return found
    message = f"rank {absent} {failure.said(groups)}, where {first.name} waited"
    fix = failure.advised(groups)
    return replace(found, message=message, ranks=(int(absent),), evidence=(), fix=fix)


def register_table() -> None:
    """Register the codes of the table of known failures as rules.

    A code that another rule already has is detected in both ways.
    """
    own = dict.fromkeys(failure.code for failure in TABLE)
    for code in own:
        known = RULES.get(code)
        if known is None:
            rows = [failure for failure in TABLE if failure.code == code]
            page = next((each.page for each in rows if each.page), "")
            name, severity = rows[0].known.name, rows[0].severity
            RULES[code] = Rule(code, name, severity, crashes, page, yields_to=_EXPLAINED_BY)
        elif known.detect is not crashes:
            # Codes of the table must not yield to each other in a circle.
            yields_to = {c: same for c, same in _EXPLAINED_BY.items() if c not in own or c < code}
            yields_to = {**yields_to, **known.yields_to}
            RULES[code] = replace(known, beside=crashes, yields_to=yields_to)


@rule("DDP901", "exception", Severity.ERROR, detect=crashes, yields_to=_EXPLAINED_BY, late=True)
class Exception:
    """A rank raised an exception, and the job failed because of it.

    What it finds
        The first exception that no other rank's failure explains; also one that the script catches
        and prints before it exits with an error status, and one in a thread that the main thread
        waits for. If exceptions wrap each other, the innermost one. torchrun's "Root Cause (first
        observed failure)" is the first exit that its agent noticed, often that of a rank that lost
        its peers. Also an exception that has not ended its process yet, because a `finally` or
        `__exit__` calls a collective, in which the rank waits for the others.

    Why it is bad
        One rank's exception ends the job on all ranks: they wait for it in a collective until their
        connection breaks or their timeout expires.

    How to fix it
        Fix the line in the finding. "Connection closed by peer" and similar messages on other ranks
        follow from it.

    Example
        Wrong: `images = next(batches)` on a rank whose loader is shorter than the others'.
        Right: loaders of equal length on every rank (`DistributedSampler` pads).

    When it stays silent
        If the job was asked to stop (Ctrl-C, SIGTERM), for caught exceptions, and for those whose
        cause another rule names (DDP303, DDP305, DDP323, DDP502, DDP707).
    """


@rule("DDP902", "killed", Severity.ERROR, detect=crashes, yields_to=_EXPLAINED_BY, late=True)
class Killed:
    """A rank was killed from outside.

    What it finds
        A rank that ended by SIGKILL, or by a signal that it did not send itself, including SIGINT
        to a single rank.

    Why it is bad
        The rank could not save or report anything. Typical causes are the out-of-memory killer
        (DDP903 if that is known), a scheduler's limit, or a person.

    How to fix it
        Check the scheduler's limits for the job (time, memory) and `dmesg`.

    Example
        Wrong: `kill -9` of one rank.
        Right: SIGTERM to the launcher, which ends all ranks.

    When it stays silent
        If the whole job was asked to stop, and for the SIGTERM that a launcher sends to the
        remaining ranks.
    """


@rule("DDP903", "out-of-memory", Severity.ERROR, detect=crashes, yields_to=_EXPLAINED_BY, late=True)
class OutOfMemory:
    """The out-of-memory killer ended a rank.

    What it finds
        A rank that died of SIGKILL, and the kernel's log named its pid, or the memory cgroup's
        counter of such kills increased.

    Why it is bad
        Host memory (not GPU memory) ran out: the machine's, or the limit of the container or job.

    How to fix it
        Use fewer DataLoader workers or a smaller `prefetch_factor`, do not load the whole data set
        in every rank, or request more memory.

    Example
        Wrong: `samples = list(dataset)` in each of eight ranks.
        Right: a `DataLoader` that reads samples when they are needed.

    When it stays silent
        If neither the kernel's log nor the cgroup can be read: that is DDP902.
    """


@rule("DDP904", "native-crash", Severity.ERROR, detect=crashes, yields_to=_EXPLAINED_BY)
class NativeCrash:
    """A rank crashed in native code.

    What it finds
        A rank that ended by SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT, with the Python stack that
        `faulthandler` wrote at that moment.

    Why it is bad
        There is no Python exception: the job's output shows only a signal number.

    How to fix it
        Look at the Python line that called native code: an extension module, a library built for
        another CPU or torch version, or a full `/dev/shm` (SIGBUS).

    Example
        Wrong: two copies of an OpenMP runtime in one process.
        Right: one environment with one runtime.

    When it stays silent
        For an abort after the script had ended (DDP906).
    """


@rule("DDP905", "silent-exit", Severity.ERROR, detect=crashes, yields_to=_EXPLAINED_BY)
class SilentExit:
    """A rank exited with an error status, without an exception.

    What it finds
        `sys.exit(n)`, `os._exit(n)` or `raise SystemExit(n)` with a status other than 0.

    Why it is bad
        Nothing is printed, and the other ranks keep waiting for this one.

    How to fix it
        Raise an exception that states the reason, or decide on all ranks together.

    Example
        Wrong:
            if loss.isnan():
                sys.exit(1)
        Right:
            bad = loss.isnan().float()
            dist.all_reduce(bad)
            if bad > 0:
                raise ValueError(f"the loss is NaN at step {step}")

    When it stays silent
        For status 0: a rank that leaves while others start another step is DDP801.
    """


@rule("DDP906", "abort-at-exit", Severity.INFO, detect=crashes)
class AbortAtExit:
    """A rank aborted after its script had ended.

    What it finds
        A rank whose interpreter reached its normal end and then died of a signal, typically SIGABRT
        with "terminate called without an active exception".

    Why it is bad
        The training is complete and its results are correct, but the exit status reports a failure.
        gloo's threads race with the end of the process, for example in torch 2.13.

    How to fix it
        Delete the DDP module and the optimizer and call `gc.collect()` before
        `destroy_process_group()`.

    Example
        Wrong:
            dist.destroy_process_group()  # while ddp is alive
        Right:
            del ddp, optimizer
            gc.collect()
            dist.destroy_process_group()

    When it stays silent
        For a signal before the end of the script: that is a crash (DDP904).
    """


@rule("DDP907", "lost-peers", Severity.ERROR, detect=crashes, yields_to=_EXPLAINED_BY)
class LostPeers:
    """The job failed, and every failure seen here is a consequence of another one.

    What it finds
        Ranks that lost their connection or timed out in a collective, in a finished job whose
        failure no rank seen here caused: the cause is on another node, in the network, or a rank
        that never came.

    Why it is bad
        The rank that reports such an error is not the one to fix.

    How to fix it
        Look at the other nodes' output first, then at the ranks that did not join the collective.

    Example
        Wrong: reading only node 0's log, where every rank reports "Connection reset by peer".
        Right: the log of the node that stopped first.

    When it stays silent
        While the job is running, if any rank has an independent failure, and in a job of one rank.
    """
