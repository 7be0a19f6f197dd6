"""Rules for crashes (DDP9xx): the first cause of a failed job, not its victims."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.opening import whole
from ddpdoctor.core.relations import ABORT, END, LOST, MISPAIRED
from ddpdoctor.core.user_code import Location, user_file
from ddpdoctor.diagnose.checkpoints.rules import refused_for_prefix
from ddpdoctor.diagnose.crashes.rank_endings import Ending, Kind, endings, first_failure
from ddpdoctor.diagnose.crashes.rules_failures import (
    EXPLAINED_BY,
    attempt_finding,
    moment,
    recognised,
    truncated,
)
from ddpdoctor.diagnose.gradients.reducer import is_explained
from ddpdoctor.failures import recognise
from ddpdoctor.run.snapshot import Run

_NATIVE = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_FAULT_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _causes(run: Run, kind: Kind) -> Iterator[tuple[int, Ending]]:
    for restart in run.restarts:
        cause = first_failure(run, restart)
        if cause is None or cause.kind != kind:
            continue
        # An end is classified once, by its text, so that only one of the rules finds it.
        if recognised(run, restart):
            continue
        yield restart, cause


@rule("DDP901", "exception", Severity.ERROR, yields_to=EXPLAINED_BY)
def exception(run: Run) -> Iterator[Finding]:
    """A rank raised an exception, and the job failed because of it.

    What it finds
        The first exception that no other rank's failure explains; also one that the script catches
        and prints before it exits with an error status, and one in a thread that the main thread
        waits for. If exceptions wrap each other, the innermost one. torchrun's "Root Cause (first
        observed failure)" is the first exit that its agent noticed, often that of a rank that lost
        its peers.

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
        If the job was asked to stop (Ctrl-C, SIGTERM), for exceptions that are caught, and for
        those whose cause another rule names (DDP303, DDP305, DDP323, DDP502, DDP707).
    """
    for restart, cause in _causes(run, "exception"):
        if cause.interrupted:
            continue
        if restart == run.restarts[-1] and is_explained(cause.text):
            continue
        if restart == run.restarts[-1] and refused_for_prefix(run, cause):
            continue
        yield attempt_finding(
            run,
            "DDP901",
            restart,
            cause,
            f"{cause.name} raised {truncated(cause.text, 200)}{moment(cause)}",
            "Fix this exception first; failures of other ranks follow from it."
            if run.has_peers
            else "Fix this exception.",
            traceback=cause.traceback,
        )


@rule("DDP902", "killed", Severity.ERROR, yields_to=EXPLAINED_BY)
def killed(run: Run) -> Iterator[Finding]:
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
    for restart, cause in _causes(run, "signal"):
        if cause.oom or -(cause.status or 0) in _NATIVE:
            continue
        yield attempt_finding(
            run,
            "DDP902",
            restart,
            cause,
            f"{cause.name} was killed by {cause.text}{moment(cause)}",
            "Find out who sent it: a scheduler's limit, a person, or the kernel (see dmesg).",
        )
    for restart, cause in _causes(run, "exception"):
        if cause.interrupted:
            yield attempt_finding(
                run,
                "DDP902",
                restart,
                cause,
                f"{cause.name}{' alone' * run.has_peers} was interrupted by SIGINT{moment(cause)}",
                "Find out who sent it: Ctrl-C in a terminal reaches all ranks. `kill` the "
                "launcher to stop the job, not one of its ranks."
                if run.has_peers
                else "Find out who sent it: a person, a scheduler, or the script itself. `kill` "
                "the launcher to stop the job.",
                traceback=cause.traceback,
            )


@rule("DDP903", "out-of-memory", Severity.ERROR, yields_to=EXPLAINED_BY)
def out_of_memory(run: Run) -> Iterator[Finding]:
    """The out-of-memory killer ended a rank.

    What it finds
        A rank that died of SIGKILL while the kernel's log named its pid, or the memory cgroup's
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
        If neither the kernel's log nor the cgroup can be read; then it is DDP902.
    """
    for restart, cause in _causes(run, "signal"):
        if not cause.oom:
            continue
        source = {
            "kernel": "the kernel's log names this process",
            "cgroup": "the memory cgroup counted an out-of-memory kill at that moment",
        }[cause.oom]
        likely = "" if cause.oom == "kernel" else "very likely "
        yield attempt_finding(
            run,
            "DDP903",
            restart,
            cause,
            f"{cause.name} was {likely}killed by the out-of-memory killer{moment(cause)}",
            "Host memory ran out: use fewer DataLoader workers, load less per rank, or raise the "
            "job's memory limit.",
            evidence=(source,),
        )


@rule("DDP904", "native-crash", Severity.ERROR, yields_to=EXPLAINED_BY)
def native_crash(run: Run) -> Iterator[Finding]:
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
    for restart, cause in _causes(run, "signal"):
        if -(cause.status or 0) not in _NATIVE or cause.oom:
            continue
        stack = _fault_stack(run, restart, cause)
        yield attempt_finding(
            run,
            "DDP904",
            restart,
            cause,
            f"{cause.name} crashed in native code with {cause.text}{moment(cause)}",
            "The line named entered the native code that crashed; suspect the extension or library "
            "it calls.",
            location=_fault_location(stack),
            traceback=stack,
        )


def _fault_stack(run: Run, restart: int, cause: Ending) -> str:
    rank = next((rank for rank in run.attempt(restart) if rank.rank == cause.rank), None)
    text = rank.fault if rank is not None else ""
    start = text.find("Fatal Python error")
    return text[start:][:8000] if start >= 0 else ""


def _fault_location(stack: str) -> Location | None:
    """The innermost user line of the thread that crashed."""
    current = stack.partition("Current thread")[2].split("\n\n")[0]
    for path, line in _FAULT_FRAME.findall(current):
        if user_file(path):
            return Location(path, whole(line))
    return None


@rule("DDP905", "silent-exit", Severity.ERROR, yields_to=EXPLAINED_BY)
def silent_exit(run: Run) -> Iterator[Finding]:
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
    for restart, cause in _causes(run, "exit"):
        refused = f"refused the script's options: {truncated(cause.message, 200)}"
        yield attempt_finding(
            run,
            "DDP905",
            restart,
            cause,
            f"{cause.name} {refused}"
            if cause.message
            else f"{cause.name} ended itself: {truncated(cause.text, 200)}{moment(cause)}",
            "Give the script the options that it takes, after `--`."
            if cause.message
            else "The script refused its options: see its message above."
            if cause.status == 2 and not cause.initialized
            else "Raise an exception that says why, or agree on leaving with all ranks."
            if run.has_peers
            else "Raise an exception that says why.",
        )


@rule("DDP906", "abort-at-exit", Severity.INFO)
def abort_at_exit(run: Run) -> Iterator[Finding]:
    """A rank aborted after its script had ended.

    What it finds
        A rank whose interpreter reached its normal end and then died of a signal, typically SIGABRT
        with "terminate called without an active exception".

    Why it is bad
        The training is complete and its results are right, but the exit status reports a failure.
        gloo's threads race with the end of the process, for instance in torch 2.13.

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
    for each in endings(run, run.restarts[-1]):
        if each.kind == "abort-at-exit" and each.rank is not None:
            yield Finding(
                code="DDP906",
                severity=Severity.INFO,
                message=f"{each.name} finished its script and then died of {each.text} at exit; "
                "training is not affected",
                ranks=(each.rank,),
                fix="Let go of the DDP module and the optimizer, gc.collect(), and only then call "
                "destroy_process_group().",
            )


@rule("DDP907", "lost-peers", Severity.ERROR, yields_to=EXPLAINED_BY)
def lost_peers(run: Run) -> Iterator[Finding]:
    """The job failed, and every failure seen here is the consequence of another one.

    What it finds
        Ranks that lost their connection or timed out in a collective, in a finished job whose cause
        is not on any rank seen here: it is on another node, in the network, or a rank that never
        came.

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
    if not run.exit_status or run.world_size == 1:
        return
    restart = run.restarts[-1]
    if first_failure(run, restart) is not None or recognised(run, restart):
        return
    subjects = frozenset((f"{END}{restart + 1}", MISPAIRED, ABORT, LOST))
    victims = [
        each
        for each in endings(run, restart)
        if each.victim
        and each.rank is not None
        and each.kind == "exception"
        and not each.interrupted
    ]
    if victims:
        first = victims[0]
        known = recognise(first.printed)
        absent = known[1].get("rank", "") if known is not None else ""
        if known is not None and absent:
            yield Finding(
                code="DDP907",
                severity=Severity.ERROR,
                message=f"rank {absent} {known[0].said(known[1])}, where {first.name} waited",
                ranks=(int(absent),),
                location=first.location,
                fix=known[0].fix,
                traceback=first.traceback,
                subjects=subjects,
            )
            return
        yield Finding(
            code="DDP907",
            severity=Severity.ERROR,
            message=f"{first.name} likely lost a peer{moment(first)}: {truncated(first.text)}",
            ranks=() if first.rank is None else (first.rank,),
            location=first.location,
            evidence=(
                "no rank of this node failed by itself",
                *(f"{each.name}: {truncated(each.text)}" for each in victims[1:4]),
            ),
            fix="Look for the cause on the other ranks or nodes: one that ended, hangs, or never "
            "called this collective.",
            traceback=first.traceback,
            subjects=subjects,
        )
