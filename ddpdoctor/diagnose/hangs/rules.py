"""Rules for jobs that hang (DDP801, DDP802, DDP805 to DDP815): which rank is missing, and why.

One function (`standstill.stands_still`) judges the newest examination (`Run.hang`) and yields the
findings of all codes except DDP801, including those of differing collectives (DDP401, DDP803,
DDP804).
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.relations import STANDSTILL, Lapsed, brings_about
from ddpdoctor.diagnose import STANDSTILLS
from ddpdoctor.diagnose.data.draws import averages_by_hand
from ddpdoctor.diagnose.hangs.rank_activity import NEVER_ENDS
from ddpdoctor.diagnose.hangs.standstill import (
    alone_behind,
    armed,
    leavers,
    stands_still,
    wish,
)
from ddpdoctor.diagnose.source_operations import loop_around, without_join
from ddpdoctor.run.records.process import ExitRecord
from ddpdoctor.run.reported import hang, start
from ddpdoctor.run.snapshot import Rank, Run


@rule("DDP801", "left-early", Severity.ERROR, supersedes=dict.fromkeys(STANDSTILLS, brings_about))
def left_early(run: Run) -> Iterator[Finding]:
    """A rank finished while the other ranks started another step.

    What it finds
        A rank whose script ended normally after fewer synchronized steps than another rank of its
        group has started. The other rank waits in a collective or failed there. So for ranks that
        average their gradients without DDP.

    Why it is bad
        The remaining ranks hang until their timeout, or fail with "Connection closed by peer". The
        launcher blames them: the rank that left has exit status 0.

    How to fix it
        Give every rank the same number of batches (`DistributedSampler` pads; `drop_last=True`
        cuts), or run the loop inside `with model.join():` if it calls no other collectives. Decide
        to stop on all ranks together.

    Example
        Wrong:
            for batch in my_shard(rank):  # 100 batches on rank 0, 97 on rank 1
                train(batch)
        Right:
            for batch in islice(my_shard(rank), 97):
                train(batch)

    When it stays silent
        Inside `join()`, for ranks of different DDP groups, for extra forwards in an evaluation, if
        a rank failed (DDP9xx), and if the cause is known: the statement by which a rank alone left
        or skipped a step (DDP403), loaders of different length (DDP109), or a collective after the
        loop under a condition on the rank (DDP401).
    """
    for leaver, wanting in leavers(run):
        if alone_behind(leaver, wanting) is None:
            yield _finding(run, leaver, wanting)


def _finding(run: Run, leaver: Rank, wanting: list[Rank]) -> Finding:
    by_hand = averages_by_hand(leaver)
    count = leaver.ended.steps if by_hand and leaver.ended is not None else armed(leaver)
    steps = f"{count} {'' if by_hand else 'synchronized '}step{'' if count == 1 else 's'}"
    evidence = [
        f"rank {leaver.rank} ended regularly after {steps}",
        *(f"rank {rank.rank} {wish(rank)}" for rank in wanting[:4]),
    ]
    location = leaver.site("data") or leaver.site("forward") or leaver.site("backward")
    location = loop_around(run, location) or location
    fix = without_join(
        run,
        location,
        "Give all ranks the same number of steps (equal shards, drop_last), or wrap the loop in "
        "`with model.join():`.",
    )
    call = next((call for call in leaver.records.of(ExitRecord) if call.status == 0), None)
    if call is not None and call.location is not None:
        location = call.location
        evidence.append(f"rank {leaver.rank} called {call.how} at {call.location}")
        fix = (
            "Exit on all ranks together: reduce the value that decides over the ranks first "
            "(dist.all_reduce)."
        )
    names = ", ".join(str(rank.rank) for rank in wanting)
    return Finding(
        code="DDP801",
        severity=Severity.ERROR,
        message=f"rank {leaver.rank} left after {steps} while "
        f"rank{'s' if len(wanting) > 1 else ''} {names} wanted another",
        ranks=(leaver.rank,),
        location=location,
        subjects=frozenset((STANDSTILL,)),
        moment=leaver.ended.time if leaver.ended is not None else 0,
        evidence=tuple(evidence),
        fix=fix,
    )


def _lapses(finding: Finding, run: Run) -> Lapsed | None:
    """Withdraw a finding about a wait only if it was at a shutdown, which may have been slow."""
    return hang(finding, run) if NEVER_ENDS in finding.message else None


@rule("DDP802", "never-joined", Severity.ERROR, detect=stands_still, lapses=hang, late=True)
class NeverJoined:
    """A rank does something else while the other ranks wait for it in a collective.

    What it finds
        Ranks that wait in a collective, and a rank that never called it: its line, for how long,
        and whether it is idle, computes, reads or writes. With NCCL also a rank whose GPU never
        reached the collective, because it is still at work that was queued before. In a job that
        failed, a rank that was at its own work until the timeout of the others.

    Why it is bad
        The others wait until their timeout (10 minutes with NCCL, 30 with gloo), and the error then
        names a rank that waited.

    How to fix it
        Look at the line of the missing rank. Work of a single rank has to be shorter than the
        timeout (`init_process_group(timeout=...)`). It is better to share it among all ranks.

    Example
        Wrong: a rank that waits for a server's answer while the others are in `backward()`.
        Right: `requests.get(url, timeout=10)`, or the same request on all ranks.

    When it stays silent
        Until `--hang-after`, which counts only the time in which a busy rank had a core, and in a
        debugger. For a rank that computes or transfers data it is a warning, and an error once
        three examinations find it in one polling loop, or its GPU at the same work. Causes with
        their own code (DDP401, DDP403, DDP801, DDP805 and up) are reported instead.
    """


@rule("DDP805", "stopped", Severity.ERROR, detect=stands_still, lapses=hang, late=True)
class Stopped:
    """A rank's process is stopped.

    What it finds
        A process in state T: stopped by SIGSTOP, SIGTSTP (Ctrl-Z) or SIGTTOU, or held by a tracer.

    Why it is bad
        It does nothing until it is continued, and the other ranks wait for it.

    How to fix it
        Run `kill -CONT PID`, and find out what stopped it: a batch system that suspends jobs, or a
        shell.

    Example
        Wrong: `kill -STOP` of one rank.
        Right: stop and continue all ranks together.

    When it stays silent
        If it is continued before `--hang-after`.
    """


@rule("DDP806", "disk-sleep", Severity.ERROR, detect=stands_still, lapses=hang, late=True)
class DiskSleep:
    """A rank waits in the kernel for a disk or a device.

    What it finds
        A process in uninterruptible sleep (state D) at two moments a second apart.

    Why it is bad
        Not even SIGKILL ends it before the device responds: a hanging network file system, a
        failing disk, or a driver.

    How to fix it
        Check the file system of the file that the line reads or writes. `dmesg` shows errors of
        devices.

    Example
        Wrong: a checkpoint written to an NFS server that is down.
        Right: write to a local disk first, then copy.

    When it stays silent
        A rank that transfers data all the time is a warning, not an error.
    """


@rule("DDP807", "endless-loop", Severity.ERROR, detect=stands_still, lapses=hang, late=True)
class EndlessLoop:
    """A rank runs in a Python loop that cannot end.

    What it finds
        A rank that computes in the same `while` at two moments, whose condition is a constant or
        reads names that the body never sets, and whose body never leaves it. Also in a data set or
        a collate function, and in a DataLoader worker if py-spy is installed.

    Why it is bad
        The other ranks wait for it until their timeout; nothing else fails.

    How to fix it
        Give the loop a way to end.

    Example
        Wrong:
            while not done:
                poll()
        Right:
            while not done:
                done = poll()

    When it stays silent
        For loops that may end: those are DDP802, a warning until three examinations agree.
    """


@rule("DDP808", "waits-for-input", Severity.ERROR, detect=stands_still, lapses=hang, late=True)
class WaitsForInput:
    """A rank waits for keyboard input.

    What it finds
        A rank in `input()` or in pdb while the others wait for it.

    Why it is bad
        Perhaps no one is at the keyboard, and under torchrun several ranks share one terminal.

    How to fix it
        Remove the call. `breakpoint()` under `ddpdoctor run` waits for a debugger to attach to that
        rank, and lifts the other ranks' timeouts meanwhile.

    Example
        Wrong: `import pdb; pdb.set_trace()` in the training loop.
        Right: `breakpoint()`

    When it stays silent
        While a rank is in ddpdoctor's debugger. A question at a terminal before the first step is
        information: the user may be about to answer it.
    """


@rule("DDP809", "waits-for-loader", Severity.ERROR, detect=stands_still, lapses=hang, late=True)
class WaitsForLoader:
    """A rank waits for a DataLoader that delivers no batch.

    What it finds
        A rank in its DataLoader while no batch arrives: its workers died, are stopped, or all
        sleep, which is a deadlock; or it loads the data itself and is stuck.

    Why it is bad
        torch detects a worker that was killed, but not one that waits forever.

    How to fix it
        A lock that was held when a worker was forked is never released in it. Start workers with
        `multiprocessing_context="spawn"`, and open files and clients in the worker. With
        `DataLoader(..., timeout=60)` torch raises an error instead.

    Example
        Wrong: a data set that takes a lock which a thread of the parent process holds.
        Right: a lock created in `worker_init_fn`.

    When it stays silent
        Workers that compute or lack a core are a warning: loading is slow then. So are those that
        wait for the network, until three examinations in a row agree.
    """


@rule("DDP810", "holds-the-gil", Severity.ERROR, detect=stands_still, lapses=hang, late=True)
class HoldsTheGil:
    """A rank is in native code that blocks all of its other Python threads.

    What it finds
        A rank whose Python threads have all not run for seconds, although its process is not
        stopped.

    Why it is bad
        Its background threads are blocked too: the DataLoader's pin-memory thread, loggers, NCCL's
        monitoring, the debugger.

    How to fix it
        Release the GIL in the extension while it works or waits.

    Example
        Wrong: `ctypes.PyDLL("libclient.so").wait()`, which holds the GIL.
        Right: `ctypes.CDLL("libclient.so").wait()`

    When it stays silent
        Until `--hang-after`, and for a process that is stopped (DDP805), in disk sleep (DDP806), or
        whose threads wait for a core.
    """


@rule("DDP811", "still-starting", Severity.WARNING, detect=stands_still, lapses=start)
class StillStarting:
    """A rank is still starting while the other ranks wait for it.

    What it finds
        Before the first step: a rank that computes, compiles, reads, writes or waits for the
        network while the others are already in a collective or in `init_process_group`.

    Why it is bad
        It may be harmless: a download or a compilation takes time. But the other ranks' timeout is
        running.

    How to fix it
        Prepare data and caches before the job starts, or raise the timeout of `init_process_group`.

    Example
        Wrong: rank 0 downloads 200 GB while the others are in a barrier.
        Right: a separate job for the download.

    When it stays silent
        For ten times `--hang-after` while any process of the job uses the CPU. A rank that idles
        elsewhere is DDP802, as a warning if it has not joined the others yet.
    """


@rule("DDP812", "died-unnoticed", Severity.ERROR, detect=stands_still, lapses=hang, late=True)
class DiedUnnoticed:
    """A rank died, and its launcher continues without it.

    What it finds
        A rank whose process is gone while the others wait for it and the job's command is still
        running.

    Why it is bad
        Some launchers wait for the ranks one by one, or in a shell's `wait`: the job hangs until a
        timeout.

    How to fix it
        Use torchrun, or a launcher that ends all ranks when one dies.

    Example
        Wrong:
            for process in processes:
                process.join()  # waits for rank 0 while rank 1 is dead
        Right:
            torch.multiprocessing.spawn(train, nprocs=8)

    When it stays silent
        If the job ends because of it, which is a crash (DDP9xx).
    """


@rule("DDP813", "waits-for-ranks", Severity.ERROR, detect=stands_still, lapses=hang)
class WaitsForRanks:
    """The job waits in the rendezvous for a node or a rank that never came.

    What it finds
        torchrun without any rank, or ranks in `init_process_group` or `new_group`, for longer than
        `--hang-after`.

    Why it is bad
        Nothing is printed until the timeout, after 10 to 30 minutes.

    How to fix it
        Start the command on every node. Check world size, address, port and firewall
        (`ddpdoctor check`).

    Example
        Wrong: `torchrun --nnodes 2 ...` on one node only.
        Right: the same command on both nodes.

    When it stays silent
        While processes are starting (they use the CPU), for ten times `--hang-after`. While one of
        them, or the launcher, computes or lacks a core. If all expected ranks have joined, it is
        DDP814.
    """


@rule("DDP814", "stands-still", Severity.WARNING, detect=stands_still, lapses=hang, late=True)
class StandsStill:
    """The job makes no progress, and no rank is to blame.

    What it finds
        All ranks in the same collective, which does not end. Or all ranks idle, with none in a
        collective. It is an error once three examinations in a row agree. With NCCL the network is
        named only if every GPU is known to have begun the collective.

    Why it is bad
        The cause may be the network, the backend, or an external service that all ranks wait for.

    How to fix it
        Check network and interfaces (`ddpdoctor check`). Look at the line where all ranks are.

    Example
        Wrong: a firewall between the nodes that drops NCCL's packets.
        Right: `NCCL_SOCKET_IFNAME` set to an interface that all nodes can reach.

    When it stays silent
        If a rank is missing or does something else, which is then reported. If a rank has no core.
        If all ranks are in a `sleep` outside a `while`, which is a pause.
    """


@rule("DDP815", "does-not-end", Severity.ERROR, detect=stands_still, lapses=_lapses)
class DoesNotEnd:
    """A rank's script is over, but its process does not exit.

    What it finds
        Ranks that reached the end of their script and wait there for longer than `--hang-after`:
        for a non-daemon thread, a child process, an `atexit` function, or in native code while the
        interpreter shuts down.

    Why it is bad
        torchrun waits for it silently, and the GPUs stay in use until the job is ended.

    How to fix it
        End threads and child processes before the script ends, or make them daemons. Delete the DDP
        model before `destroy_process_group()`: with gloo, torch 2.13 sometimes hangs if the
        interpreter's shutdown deletes it.

    Example
        Wrong:
            thread = threading.Thread(target=upload)  # waits for the queue forever
            thread.start()
        Right:
            queue.put(None)  # at the end of the script: upload() returns
            thread.join()

    When it stays silent
        Until `--hang-after`; for 5 minutes if the rank computes, lacks a core, writes or waits for
        the network. It is a warning, unless native code hangs or other ranks wait for this one.
    """
