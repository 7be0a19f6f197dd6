"""How ranks end: what launchers and peers print, and what says nothing."""

from __future__ import annotations

from ddpdoctor.core.finding import Severity
from ddpdoctor.failures.model import Failure, Known, Weight

_LOOK = (
    "The cause is on the rank that did not come, or ended first: look at its output, and at its "
    "node. `ddpdoctor run` sees all ranks."
)

_LOG_DIR = (
    "Get the output of that rank: torchrun --log-dir DIR --redirects 3 keeps each rank's, or start "
    "with ddpdoctor run."
)

FAILURES = (
    Failure(
        Known("DDP907", "absent-from-barrier", Weight.SYMPTOM, "1.13, 2.13"),
        r"Rank (?P<rank>\d+) failed to pass monitoredBarrier",
        examples=(
            "[E1122 03:10:10.529107999 ProcessGroupGloo.cpp:67] [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms",
        ),
        says="never came to monitored_barrier",
        fix="See what that rank does instead: a branch on the rank, a slow save, or it ended.",
    ),
    Failure(
        Known("DDP907", "nccl-timeout", Weight.SYMPTOM, "2.x; pytorch#118369"),
        r"Watchdog caught collective operation timeout: WorkNCCL\((?:SeqNum=(?P<seq>\d+), )?"
        r"OpType=(?P<op>\w+)(?:[^\n]{0,999}?ran for (?P<ms>\d+) milliseconds)?",
        examples=(
            "[E1122 10:30:21.207 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600028 milliseconds before timing out.",
        ),
        says="waited[ {ms} ms] in {op}[ #{seq}], which did not complete",
        yields_to=("collectives-differ", "absent-from-barrier"),
        fix="Compare the numbers of all ranks: the rank with a smaller one, or none, did not come; see "
        "its output. If all have the same one, a link or a GPU failed: see `dmesg` for Xid, set "
        "NCCL_DEBUG=INFO, and run `ddpdoctor check`.",
    ),
    Failure(
        Known("DDP907", "nccl-timeout-unnumbered", Weight.SYMPTOM, "2.15"),
        r"Aborting process on rank \d+ due to timeout|NCCL operation timed out",
        examples=(
            "torch.distributed.DistBackendError: Watchdog caught collective operation timeout: NCCL operation timed out",
            "[E1122 10:30:21.201 ProcessGroupNCCL.cpp:871] [TC][rank=0][name=0] Aborting process on rank 0 due to timeout - timeout watchdog detected operation timeout",
        ),
        says="waited in a collective of NCCL until its timeout, and some other rank did not come",
        fix="It does not say in which collective: `ddpdoctor run` names it, and its line. " + _LOOK,
    ),
    Failure(
        Known("DDP907", "gloo-timeout", Weight.SYMPTOM, "1.13, 2.6, 2.13; pytorch#38174"),
        r"Timed out waiting (?P<ms>\d+)ms for (?:recv|send) operation",
        examples=(
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete",
        ),
        says="waited {ms} ms in a collective that some other rank did not join",
        fix="Batches of unequal number, a branch on the rank, or a slow save on one of them. "
        + _LOOK,
    ),
    Failure(
        Known("DDP907", "peer-closed", Weight.CONSEQUENCE, "1.13, 2.6, 2.13"),
        r"Connection closed by peer \[|Read error \[[^\]]+\]:\d+: |writev \[[^\]]+\]:\d+: "
        r"|Application timeout caused pair closure",
        examples=(
            "RuntimeError: [/pytorch/gloo/pair.cc:553] Connection closed by peer [10.0.0.4]:6294",
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:6862: Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application. Check the logs of the remote worker befo",
        ),
        says="lost its connection to a peer",
        fix=_LOOK,
    ),
    Failure(
        Known("DDP907", "nccl-aborted", Weight.CONSEQUENCE, "2.x"),
        r"NCCL communicator (?:was|is) aborted|ncclRemoteError"
        r"|due to [^\n]{0,999}remote process exited"
        r"|remote process exited or there was a network error",
        examples=(
            "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0. Original reason for failure was: remote process exited or there was a network error",
        ),
        says="lost its peers in NCCL",
        fix=_LOOK,
    ),
    Failure(
        Known("DDP907", "store-gone", Weight.CONSEQUENCE, "2.6, 2.13; pytorch#128970"),
        r"TCPStore[^\n]{0,999}(?:Broken pipe|Connection reset|got 0 bytes)"
        r"|[Ff]ailed to recv, got 0 bytes|[Ff]ailed to check the \"should dump\" flag",
        examples=(
            "[W1122 03:09:04.111 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=3): Broken pipe",
            '[rank1]:[W1122 03:09:04.111 ProcessGroupNCCL.cpp:1783] [PG ID 0 PG GUID 0 Rank 1] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early)',
        ),
        says="lost the job's store, which ends with rank 0 or its torchrun",
        fix=_LOOK,
    ),
    Failure(
        Known("DDP903", "slurm-out-of-memory", Weight.DECISIVE, "any"),
        r"slurmstepd: error: Detected \d+ oom[-_ ]?kill event",
        examples=(
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=4711.0. Some of the step tasks have been OOM Killed.",
        ),
        says="was killed by the out-of-memory killer, as Slurm says",
        fix="The job's memory limit (--mem) was reached: fewer DataLoader workers, less data in "
        "each rank, or more memory.",
    ),
    Failure(
        Known("DDP902", "sigkill", Weight.GENERIC, "1.13, 2.6, 2.13"),
        r"exitcode\s*: ?-9\b|process (?P<rank>\d+) terminated with signal SIGKILL",
        examples=(
            "exitcode  : -9 (pid: 13764)  (SIGKILL)",
            "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",
        ),
        says="was killed by SIGKILL",
        fix="The out-of-memory killer (`dmesg`, oom_kill in the cgroup's memory.events), a "
        "scheduler's limit, or a person.",
    ),
    Failure(
        Known("DDP902", "task-killed", Weight.GENERIC, "Slurm"),
        r"srun: error: (?P<node>\S+): (?:task (?P<task>\d+)|tasks [\d,-]+): Killed",
        examples=("srun: error: node3: task 5: Killed", "srun: error: node3: tasks 0-3: Killed"),
        says="was killed by SIGKILL",
        fix="The out-of-memory killer (`dmesg`, oom_kill in the cgroup's memory.events), a "
        "scheduler's limit, or a person.",
        # Which kills the tasks that do not end by themselves.
        follows=("cancelled",),
    ),
    Failure(
        Known("DDP904", "native-crash", Weight.GENERIC, "2.13"),
        r"exitcode\s*: ?-(?:11|7|8|4)\b(?: \(pid: \d+\)\s+\((?P<name>SIG\w+)\))?"
        r"|process (?P<rank>\d+) terminated with signal (?P<signal>SIG(?:SEGV|BUS|FPE|ILL))"
        r"|srun: error: (?P<node>\S+): task (?P<task>\d+): (?:Segmentation fault|Bus error)",
        examples=("exitcode  : -11 (pid: 13790)  (SIGSEGV)",),
        says="crashed in native code[ with {name}][ with {signal}]",
        fix="Run with PYTHONFAULTHANDLER=1 to see the Python line; suspect extensions, and "
        "libraries that do not fit torch. SIGBUS: see whether /dev/shm is full.",
    ),
    Failure(
        Known("DDP905", "exit-status", Weight.GENERIC, "1.13, 2.6, 2.13"),
        r"exitcode\s*: ?(?P<status>(?!1\b)[1-9]\d*)",
        examples=("exitcode  : 7 (pid: 13803)",),
        says="ended itself with exit status {status}",
        yields_to=("exception",),
        fix="Nothing else is known of it: raise an exception that says why, or see what the script "
        "prints before.",
    ),
    Failure(
        Known("DDP906", "abort-at-exit", Weight.SYMPTOM, "2.13"),
        r"terminate called without an active exception",
        examples=("terminate called without an active exception",),
        says="aborted at its very end, in a race of gloo's threads with the end of the process",
        fix="If the training was complete, its results are right. Let go of the DDP module and the "
        "optimizer, gc.collect(), and only then destroy_process_group().",
        likely=True,
        severity=Severity.INFO,
    ),
    Failure(
        Known("DDP904", "abort", Weight.CONSEQUENCE, "any"),
        r"exitcode\s*: ?-6\b|process (?P<rank>\d+) terminated with signal SIGABRT",
        examples=("exitcode  : -6 (pid: 77)",),
        says="aborted in native code (SIGABRT)",
        fix="Look above for lines of NCCL, gloo or glibc (`what():`) that say why.",
    ),
    Failure(
        Known("DDP907", "mpi-failed", Weight.GENERIC, "Open MPI, MPICH, Intel MPI"),
        r"\*\*\* An error occurred in (?P<call>\w+)|Fatal error in P?(?P<raised>MPI_\w+): "
        r"|MPI_ERRORS_ARE_FATAL",
        examples=(
            "[node3:4711] *** An error occurred in MPI_Allreduce",
            "[node3:4711] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,",
            "Fatal error in PMPI_Init_thread: Other MPI error, error stack:",
        ),
        says="had MPI fail[ in {call}][ in {raised}], which ends the whole job",
        fix="The lines around it say why: of UCX or the fabric, that a peer or a link is gone; of "
        "PMI, that the launcher and the MPI library do not fit (srun --mpi=list).",
    ),
    Failure(
        Known("DDP902", "left-behind", Weight.NOTE, "Python 3.8 to 3.13"),
        r"resource_tracker: There appear to be \d+ leaked (?P<what>\w+) objects",
        examples=(
            "/usr/lib/python3.10/multiprocessing/resource_tracker.py:224: UserWarning: resource_tracker: There appear to be 6 leaked semaphore objects to clean up at shutdown",
        ),
        says="ended without cleaning up ({what} objects), as a process that is killed does",
        fix="If the job was not done: see `dmesg`, the scheduler's record, and who stopped it.",
        severity=Severity.INFO,
    ),
    Failure(
        Known("DDP907", "stopped-by-torchrun", Weight.WRAPPER, "1.13, 2.6, 2.13"),
        r"exitcode\s*: ?-(?:15|2)\b",
        examples=("exitcode  : -15 (pid: 13314)",),
        says="was stopped by its launcher after another rank had failed",
        fix=_LOOK,
    ),
    Failure(
        Known("DDP907", "exit-status-1", Weight.WRAPPER, "1.13, 2.6, 2.13"),
        r"exitcode\s*: ?1\b",
        examples=("exitcode  : 1 (pid: 13434)",),
        says="failed first, with exit status 1; why is not in this log",
        fix=_LOG_DIR,
    ),
    Failure(
        Known("DDP907", "spawned-failed", Weight.WRAPPER, "1.5 to 1.7"),
        r"^Exception:?\s*$",
        # The parent raises what its process printed, whose traceback follows.
        within=r"multiprocessing/spawn\.py\", line \d+, in join",
        says="failed, as the process that spawned it noticed; why is not in this log",
        fix=_LOG_DIR,
        examples=(
            'Traceback (most recent call last):\n  File "/lib/torch/multiprocessing/spawn.py", line 119, in join\n    raise Exception(msg)\nException:',
        ),
    ),
    Failure(
        Known("DDP907", "child-failed", Weight.WRAPPER, "1.13, 2.6, 2.13"),
        r"ChildFailedError|Process(?:Exited|Raised)Exception",
        examples=(
            "torch.multiprocessing.spawn.ProcessRaisedException:",
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        ),
        says="failed, as its launcher noticed; why is not in this log",
        fix=_LOG_DIR,
    ),
)
