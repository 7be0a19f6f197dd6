"""Jobs that stand still (DDP802 and DDP805 to DDP815): who is missing, and what it does instead.

All of them read one examination (`Run.hang`), which `ddpdoctor.rules.diagnosis` judges once.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.analysis.exit_waits import NEVER_ENDS
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.relations import Lapsed, hang, start
from ddpdoctor.rules.diagnosis import diagnosed
from ddpdoctor.run.snapshot import Run


@rule("DDP802", "never-joined", Severity.ERROR, lapses=hang)
def never_joined(run: Run) -> Iterator[Finding]:
    """A rank does something else while the others wait for it in a collective.

    What it finds
        Ranks that wait in a collective, and one that never called it: where that one is instead,
        for how long, and whether it is idle, computes, reads or writes.

    Why it is bad
        The others wait until their timeout (10 minutes with NCCL, 30 with gloo), and the error then
        names a rank that waited.

    How to fix it
        Look at the line the missing rank is at. Work that one rank does alone has to be shorter
        than the timeout (`init_process_group(timeout=...)`); better let all ranks share it.

    Example
        Wrong: a rank that waits for an answer of a server while the others are in `backward()`.
        Right: a timeout on that request, or the request made by all ranks.

    When it stays silent
        Until `--hang-after`, which for a rank that works counts only the time in which it had a
        core; in a debugger. A rank that computes or moves bytes, also over the network, is a
        warning, not an error. Causes with a code of their own (DDP401, DDP403,
        DDP801, DDP805 on) come first.

    Since
        0.1.0
    """
    yield from diagnosed(run, "DDP802")


@rule("DDP805", "stopped", Severity.ERROR, lapses=hang)
def stopped(run: Run) -> Iterator[Finding]:
    """A rank's process is stopped.

    What it finds
        A process in state T: by SIGSTOP, SIGTSTP (Ctrl-Z) or SIGTTOU; or held by a tracer.

    Why it is bad
        It does nothing until it is continued, and the others wait for it.

    How to fix it
        `kill -CONT PID`, and find out who stopped it: a batch system that suspends jobs, a shell.

    Example
        Wrong: `kill -STOP` of one rank. Right: stop and continue all of them together.

    When it stays silent
        When it is continued before `--hang-after`.

    Since
        0.1.0
    """
    yield from diagnosed(run, "DDP805")


@rule("DDP806", "disk-sleep", Severity.ERROR, lapses=hang)
def disk_sleep(run: Run) -> Iterator[Finding]:
    """A rank waits in the kernel for a disk or a device.

    What it finds
        A process in uninterruptible sleep (state D) at two moments a second apart.

    Why it is bad
        Not even SIGKILL ends it before the device answers: a hanging network file system, a failing
        disk, a driver.

    How to fix it
        Look at the file system of the file that the line reads or writes; `dmesg` tells of devices.

    Example
        Wrong: a checkpoint on an NFS server that is gone.
        Right: a local disk first, then a copy.

    When it stays silent
        A rank that moves bytes all the while is a warning, not an error.

    Since
        0.1.0
    """
    yield from diagnosed(run, "DDP806")


@rule("DDP807", "endless-loop", Severity.ERROR, lapses=hang)
def endless_loop(run: Run) -> Iterator[Finding]:
    """A rank runs in a Python loop that cannot end.

    What it finds
        A rank that computes within one and the same `while` at two moments, whose test is a
        constant or reads names that its body never sets, and whose body never leaves it. Also in a
        data set or a collate function; in a DataLoader's worker where py-spy is installed.

    Why it is bad
        The other ranks wait for it for ever; nothing fails but their timeout.

    How to fix it
        Give the loop a way to end.

    Example
        Wrong: `while not done: poll()`, where nothing sets `done`.
        Right: `while not done: done = poll()`.

    When it stays silent
        For loops that may end, however long they take: those are DDP802, as a warning.

    Since
        0.1.0
    """
    yield from diagnosed(run, "DDP807")


@rule("DDP808", "waits-for-input", Severity.ERROR, lapses=hang)
def waits_for_input(run: Run) -> Iterator[Finding]:
    """A rank waits for keyboard input.

    What it finds
        A rank in `input()`, or in pdb, while the others wait for it.

    Why it is bad
        There may be no one at the keyboard, and under torchrun several ranks share one.

    How to fix it
        Take it out. `breakpoint()` under `ddpdoctor run` waits for a debugger that attaches to that
        rank, and keeps the others from timing out.

    Example
        Wrong: `import pdb; pdb.set_trace()` in the training loop. Right: `breakpoint()`.

    When it stays silent
        While a rank is in the debugger that ddpdoctor offers. A question at a terminal before the
        first step is an info: somebody may be looking for the answer.

    Since
        0.1.0
    """
    yield from diagnosed(run, "DDP808")


@rule("DDP809", "waits-for-loader", Severity.ERROR, lapses=hang)
def waits_for_loader(run: Run) -> Iterator[Finding]:
    """A rank waits for a DataLoader that gives nothing.

    What it finds
        A rank in its DataLoader while nothing comes: its workers died, are stopped, or all sleep,
        which is a deadlock; or it loads the data itself and is stuck there.

    Why it is bad
        torch notices a worker that was killed, but not one that waits for ever.

    How to fix it
        Locks that were held when a worker was forked never open in it: start workers with
        `multiprocessing_context="spawn"`, open files and clients in the worker. `DataLoader(...,
        timeout=60)` makes an error of it.

    Example
        Wrong: a data set that takes a lock which a thread of the parent holds.
        Right: a lock made in `worker_init_fn`.

    When it stays silent
        Workers that compute, or would if they had a core, or wait for the network, are a warning:
        loading is slow, then.

    Since
        0.1.0
    """
    yield from diagnosed(run, "DDP809")


@rule("DDP810", "holds-the-gil", Severity.ERROR, lapses=hang)
def holds_the_gil(run: Run) -> Iterator[Finding]:
    """A rank is in native code that does not let other Python threads run.

    What it finds
        A rank none of whose Python threads has run for seconds, though its process is not stopped.

    Why it is bad
        Its own background threads stand still, too: the DataLoader's pin-memory thread, loggers,
        NCCL's monitoring, the debugger.

    How to fix it
        Release the GIL in the extension while it works or waits.

    Example
        Wrong: `ctypes.PyDLL(...)` for a function that waits. Right: `ctypes.CDLL(...)`.

    When it stays silent
        Until `--hang-after`; for a process that is stopped (DDP805) or in disk sleep (DDP806), or
        whose threads wait for a core.

    Since
        0.1.0
    """
    yield from diagnosed(run, "DDP810")


@rule("DDP811", "still-starting", Severity.WARNING, lapses=start)
def still_starting(run: Run) -> Iterator[Finding]:
    """A rank is still starting up while the others wait for it.

    What it finds
        Before the first step: a rank that computes, compiles, reads, writes or waits for the
        network while the others are in a collective, or in `init_process_group`, already.

    Why it is bad
        It need not be: a download or a compilation takes its time. But the others' timeout runs.

    How to fix it
        Prepare the data and caches before the job starts, or raise the timeout of
        `init_process_group`.

    Example
        Wrong: rank 0 downloads 200 GB while the others are in a barrier.
        Right: a separate job for the download.

    When it stays silent
        For ten times `--hang-after` while any process of the job uses the CPU. A rank that idles
        elsewhere is DDP802; as a warning before it has joined the others at all.

    Since
        0.1.0
    """
    yield from diagnosed(run, "DDP811")


@rule("DDP812", "died-unnoticed", Severity.ERROR, lapses=hang)
def died_unnoticed(run: Run) -> Iterator[Finding]:
    """A rank has died, and its launcher goes on as if it had not.

    What it finds
        A rank whose process is gone, while the others wait for it and the job's command lives.

    Why it is bad
        Some launchers wait for the ranks one after the other, or in a shell's `wait`: the job hangs
        until a timeout.

    How to fix it
        Use torchrun, or a launcher that ends all ranks when one dies.

    Example
        Wrong: `for p in processes: p.join()`. Right: `torch.multiprocessing.spawn(...)`.

    When it stays silent
        When the job ends because of it, which is a crash (DDP9xx).

    Since
        0.1.0
    """
    yield from diagnosed(run, "DDP812")


@rule("DDP813", "waits-for-ranks", Severity.ERROR, lapses=hang)
def waits_for_ranks(run: Run) -> Iterator[Finding]:
    """Everybody waits in rendezvous for a node or a rank that never came.

    What it finds
        torchrun without any rank, or ranks in `init_process_group` (or `new_group`), for longer
        than `--hang-after`.

    Why it is bad
        Nothing is printed until the timeout, which is 10 to 30 minutes.

    How to fix it
        Start the command on every node; check world size, address, port and firewall.

    Example
        Wrong: `--nnodes 2`, started on one node. Right: started on both.

    When it stays silent
        While processes still start (they use the CPU), for ten times `--hang-after`; while one of
        them, or the launcher, computes or lacks a core. When as many ranks have come as were asked
        for, that is DDP814.

    Since
        0.1.0
    """
    yield from diagnosed(run, "DDP813")


@rule("DDP814", "stands-still", Severity.WARNING, lapses=hang)
def stands_still(run: Run) -> Iterator[Finding]:
    """The job makes no progress, and no rank of it is to blame.

    What it finds
        All ranks in one and the same collective, which does not end; or all idle, and none in a
        collective.

    Why it is bad
        It may be the network, the backend, or something outside that all wait for.

    How to fix it
        Check network and interfaces; look at the line that all ranks are at.

    Example
        Wrong: a firewall between the nodes that drops what NCCL sends.
        Right: `NCCL_SOCKET_IFNAME` set to an interface that all nodes reach.

    When it stays silent
        When a rank is missing, or does something else: then that is said. When a rank has no core
        to work on. When all ranks are in a `sleep` outside of a `while`: a pause.

    Since
        0.1.0
    """
    yield from diagnosed(run, "DDP814")


def _lapses(finding: Finding, run: Run) -> Lapsed | None:
    """What a rank was seen to wait for did keep it there; a shutdown may only be slow."""
    return hang(finding, run) if NEVER_ENDS in finding.message else None


@rule("DDP815", "does-not-end", Severity.ERROR, lapses=_lapses)
def does_not_end(run: Run) -> Iterator[Finding]:
    """The script of a rank is over, and its process does not end.

    What it finds
        Ranks that have come to the end of their script and wait there, for longer than
        `--hang-after`: for a thread that is no daemon, for a child process, in something that was
        registered with `atexit`, or in native code while Python is taken down.

    Why it is bad
        torchrun waits for it silently, and the GPUs stay taken, until the job is ended.

    How to fix it
        Let threads and child processes end before the script does, or make them daemons. Let go of
        the DDP model before `destroy_process_group()`: with gloo, torch 2.13 waits now and then
        forever if the interpreter itself takes down the last reference to it.

    Example
        Wrong: `threading.Thread(target=upload).start()`, where `upload` waits for a queue forever.
        Right: `None` put into that queue at the end of the script, which ends the loop.

    When it stays silent
        Until `--hang-after`; for 5 minutes where the rank computes, lacks a core, writes, or waits
        for the network at its end. It is a warning, unless native code hangs, or other ranks
        wait for this one.

    Since
        0.1.0
    """
    yield from diagnosed(run, "DDP815")
