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
        says="never came to monitored_barrier",
        fix="See what that rank does instead: a branch on the rank, a slow save, or it ended.",
    ),
    Failure(
        Known("DDP907", "nccl-timeout", Weight.SYMPTOM, "2.x; pytorch#118369"),
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+), "
        r"OpType=(?P<op>\w+)(?:[^\n]{0,999}?ran for (?P<ms>\d+) milliseconds)?",
        says="waited[ {ms} ms] in {op} #{seq}, and some other rank did not come",
        fix="Compare the numbers of all ranks: the rank with a smaller one, or none, did not come. "
        + _LOOK,
    ),
    Failure(
        Known("DDP907", "nccl-timeout-unnumbered", Weight.SYMPTOM, "2.15"),
        r"Aborting process on rank \d+ due to timeout|NCCL operation timed out",
        says="waited in a collective of NCCL until its timeout, and some other rank did not come",
        fix="It does not say in which collective: `ddpdoctor run` names it, and its line. " + _LOOK,
    ),
    Failure(
        Known("DDP907", "gloo-timeout", Weight.SYMPTOM, "1.13, 2.6, 2.13; pytorch#38174"),
        r"Timed out waiting (?P<ms>\d+)ms for (?:recv|send) operation",
        says="waited {ms} ms in a collective that some other rank did not join",
        fix="Batches of unequal number, a branch on the rank, or a slow save on one of them. "
        + _LOOK,
    ),
    Failure(
        Known("DDP907", "peer-closed", Weight.CONSEQUENCE, "1.13, 2.6, 2.13"),
        r"Connection closed by peer \[|Read error \[[^\]]+\]:\d+: |writev \[[^\]]+\]:\d+: "
        r"|Application timeout caused pair closure",
        says="lost its connection to a peer",
        fix=_LOOK,
    ),
    Failure(
        Known("DDP907", "nccl-aborted", Weight.CONSEQUENCE, "2.x"),
        r"NCCL communicator (?:was|is) aborted|ncclRemoteError"
        r"|due to [^\n]{0,999}remote process exited"
        r"|remote process exited or there was a network error",
        says="lost its peers in NCCL",
        fix=_LOOK,
    ),
    Failure(
        Known("DDP907", "store-gone", Weight.CONSEQUENCE, "2.6, 2.13; pytorch#128970"),
        r"TCPStore[^\n]{0,999}(?:Broken pipe|Connection reset|got 0 bytes)"
        r"|[Ff]ailed to recv, got 0 bytes|[Ff]ailed to check the \"should dump\" flag",
        says="lost the job's store, which ends with rank 0 or its torchrun",
        fix=_LOOK,
    ),
    Failure(
        Known("DDP903", "slurm-out-of-memory", Weight.CAUSE, "any"),
        r"slurmstepd: error: Detected \d+ oom[-_ ]?kill event",
        says="was killed by the out-of-memory killer, as Slurm says",
        fix="The job's memory limit (--mem) was reached: fewer DataLoader workers, less data in "
        "each rank, or more memory.",
    ),
    Failure(
        Known("DDP902", "sigkill", Weight.GENERIC, "1.13, 2.6, 2.13"),
        r"exitcode\s*: ?-9\b|process (?P<rank>\d+) terminated with signal SIGKILL"
        r"|srun: error: (?P<node>\S+): task (?P<task>\d+): Killed",
        says="was killed by SIGKILL",
        fix="The out-of-memory killer (`dmesg`, oom_kill in the cgroup's memory.events), a "
        "scheduler's limit, or a person.",
    ),
    Failure(
        Known("DDP904", "native-crash", Weight.GENERIC, "2.13"),
        r"exitcode\s*: ?-(?:11|7|8|4)\b(?: \(pid: \d+\)\s+\((?P<name>SIG\w+)\))?"
        r"|process (?P<rank>\d+) terminated with signal (?P<signal>SIG(?:SEGV|BUS|FPE|ILL))"
        r"|srun: error: (?P<node>\S+): task (?P<task>\d+): (?:Segmentation fault|Bus error)",
        says="crashed in native code[ with {name}][ with {signal}]",
        fix="Run with PYTHONFAULTHANDLER=1 to see the Python line; suspect extensions, and "
        "libraries that do not fit torch. SIGBUS: see whether /dev/shm is full.",
    ),
    Failure(
        Known("DDP905", "exit-status", Weight.GENERIC, "1.13, 2.6, 2.13"),
        r"exitcode\s*: ?(?P<status>(?!1\b)[1-9]\d*)",
        says="ended itself with exit status {status}",
        fix="Nothing else is known of it: raise an exception that says why, or see what the script "
        "prints before.",
    ),
    Failure(
        Known("DDP906", "abort-at-exit", Weight.SYMPTOM, "2.13"),
        r"terminate called without an active exception",
        says="aborted at its very end, in a race of gloo's threads with the end of the process",
        fix="If the training was complete, its results are right. Let go of the DDP module and the "
        "optimizer, gc.collect(), and only then destroy_process_group().",
        likely=True,
        severity=Severity.INFO,
    ),
    Failure(
        Known("DDP904", "abort", Weight.CONSEQUENCE, "any"),
        r"exitcode\s*: ?-6\b|process (?P<rank>\d+) terminated with signal SIGABRT",
        says="aborted in native code (SIGABRT)",
        fix="Look above for lines of NCCL, gloo or glibc (`what():`) that say why.",
    ),
    Failure(
        Known("DDP907", "stopped-by-torchrun", Weight.WRAPPER, "1.13, 2.6, 2.13"),
        r"exitcode\s*: ?-(?:15|2)\b",
        says="was stopped by its launcher after another rank had failed",
        fix=_LOOK,
    ),
    Failure(
        Known("DDP907", "exit-status-1", Weight.WRAPPER, "1.13, 2.6, 2.13"),
        r"exitcode\s*: ?1\b",
        says="failed first, with exit status 1; why is not in this log",
        fix=_LOG_DIR,
    ),
    Failure(
        Known("DDP907", "child-failed", Weight.WRAPPER, "1.13, 2.6, 2.13"),
        r"ChildFailedError|Process(?:Exited|Raised)Exception",
        says="failed, as its launcher noticed; why is not in this log",
        fix=_LOG_DIR,
    ),
)
