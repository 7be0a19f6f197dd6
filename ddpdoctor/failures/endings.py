"""How ranks end: what launchers and peers print, and what says nothing."""

from __future__ import annotations

from ddpdoctor.core.finding import Severity
from ddpdoctor.failures.model import Failure, Weight

_LOOK = (
    "The cause is on the rank that did not come, or ended first: look at its output, and at its "
    "node. `ddpdoctor run` sees all ranks."
)

FAILURES = (
    Failure(
        code="DDP907",
        name="absent-from-barrier",
        weight=Weight.SYMPTOM,
        anchors=("monitoredBarrier",),
        pattern=r"Rank (?P<rank>\d+) failed to pass monitoredBarrier",
        says="never came to monitored_barrier",
        fix="See what that rank does instead: a branch on the rank, a slow save, or it ended.",
        torch="1.13, 2.13",
    ),
    Failure(
        code="DDP907",
        name="nccl-timeout",
        weight=Weight.SYMPTOM,
        anchors=("Watchdog caught collective operation timeout",),
        pattern=r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+), "
        r"OpType=(?P<op>\w+)(?:[^\n]*?ran for (?P<ms>\d+) milliseconds)?",
        says="waited[ {ms} ms] in {op} #{seq}, and some other rank did not come",
        fix="Compare the numbers of all ranks: the rank with a smaller one, or none, did not come. "
        + _LOOK,
        torch="2.x; pytorch#118369",
    ),
    Failure(
        code="DDP907",
        name="nccl-timeout-unnumbered",
        weight=Weight.SYMPTOM,
        anchors=("due to timeout", "NCCL operation timed out"),
        pattern=r"Aborting process on rank \d+ due to timeout|NCCL operation timed out",
        says="waited in a collective of NCCL until its timeout, and some other rank did not come",
        fix="It does not say in which collective: `ddpdoctor run` names it, and its line. " + _LOOK,
        torch="2.15",
    ),
    Failure(
        code="DDP907",
        name="gloo-timeout",
        weight=Weight.SYMPTOM,
        anchors=("Timed out waiting",),
        pattern=r"Timed out waiting (?P<ms>\d+)ms for (?:recv|send) operation",
        says="waited {ms} ms in a collective that some other rank did not join",
        fix="Batches of unequal number, a branch on the rank, or a slow save on one of them. "
        + _LOOK,
        torch="1.13, 2.6, 2.13; pytorch#38174",
    ),
    Failure(
        code="DDP907",
        name="peer-closed",
        weight=Weight.CONSEQUENCE,
        anchors=(
            "Connection closed by peer",
            "Connection reset by peer",
            "Read error [",
            "writev [",
            "Application timeout caused pair closure",
        ),
        pattern=r"Connection closed by peer \[|Read error \[[^\]]+\]:\d+: |writev \[[^\]]+\]:\d+: "
        r"|Application timeout caused pair closure",
        says="lost its connection to a peer",
        fix=_LOOK,
        torch="1.13, 2.6, 2.13",
    ),
    Failure(
        code="DDP907",
        name="nccl-aborted",
        weight=Weight.CONSEQUENCE,
        anchors=("NCCL communicator", "ncclRemoteError", "remote process exited"),
        pattern=r"NCCL communicator (?:was|is) aborted|ncclRemoteError"
        r"|due to [^\n]*remote process exited|remote process exited or there was a network error",
        says="lost its peers in NCCL",
        fix=_LOOK,
        torch="2.x",
    ),
    Failure(
        code="DDP907",
        name="store-gone",
        weight=Weight.CONSEQUENCE,
        anchors=("TCPStore", "got 0 bytes", "should dump"),
        pattern=r"TCPStore[^\n]*(?:Broken pipe|Connection reset|got 0 bytes)"
        r"|[Ff]ailed to recv, got 0 bytes|[Ff]ailed to check the \"should dump\" flag",
        says="lost the job's store, which ends with rank 0 or its torchrun",
        fix=_LOOK,
        torch="2.6, 2.13; pytorch#128970",
    ),
    Failure(
        code="DDP903",
        name="slurm-out-of-memory",
        weight=Weight.CAUSE,
        anchors=("slurmstepd: error: Detected",),
        pattern=r"slurmstepd: error: Detected \d+ oom[-_ ]?kill event",
        says="was killed by the out-of-memory killer, as Slurm says",
        fix="The job's memory limit (--mem) was reached: fewer DataLoader workers, less data in "
        "each rank, or more memory.",
        torch="any",
    ),
    Failure(
        code="DDP902",
        name="sigkill",
        weight=Weight.GENERIC,
        anchors=("exitcode", "terminated with signal", "srun: error"),
        pattern=r"exitcode\s*: ?-9\b|process (?P<rank>\d+) terminated with signal SIGKILL"
        r"|srun: error: (?P<node>\S+): task (?P<task>\d+): Killed",
        says="was killed by SIGKILL",
        fix="The out-of-memory killer (`dmesg`, oom_kill in the cgroup's memory.events), a "
        "scheduler's limit, or a person.",
        torch="1.13, 2.6, 2.13",
    ),
    Failure(
        code="DDP904",
        name="native-crash",
        weight=Weight.GENERIC,
        anchors=("exitcode", "terminated with signal", "srun: error"),
        pattern=r"exitcode\s*: ?-(?:11|7|8|4)\b(?: \(pid: \d+\)\s+\((?P<name>SIG\w+)\))?"
        r"|process (?P<rank>\d+) terminated with signal (?P<signal>SIG(?:SEGV|BUS|FPE|ILL))"
        r"|srun: error: (?P<node>\S+): task (?P<task>\d+): (?:Segmentation fault|Bus error)",
        says="crashed in native code[ with {name}][ with {signal}]",
        fix="Run with PYTHONFAULTHANDLER=1 to see the Python line; suspect extensions, and "
        "libraries that do not fit torch. SIGBUS: see whether /dev/shm is full.",
        torch="2.13",
    ),
    Failure(
        code="DDP905",
        name="exit-status",
        weight=Weight.GENERIC,
        anchors=("exitcode",),
        pattern=r"exitcode\s*: ?(?P<status>(?!1\b)[1-9]\d*)",
        says="ended itself with exit status {status}",
        fix="Nothing else is known of it: raise an exception that says why, or see what the script "
        "prints before.",
        torch="1.13, 2.6, 2.13",
    ),
    Failure(
        code="DDP906",
        name="abort-at-exit",
        weight=Weight.SYMPTOM,
        anchors=("terminate called without an active exception",),
        pattern=r"terminate called without an active exception",
        says="aborted at its very end, in a race of gloo's threads with the end of the process",
        fix="If the training was complete, its results are right. Let go of the DDP module and the "
        "optimizer, gc.collect(), and only then destroy_process_group().",
        likely=True,
        severity=Severity.INFO,
        torch="2.13",
    ),
    Failure(
        code="DDP904",
        name="abort",
        weight=Weight.CONSEQUENCE,
        anchors=("exitcode", "terminated with signal"),
        pattern=r"exitcode\s*: ?-6\b|process (?P<rank>\d+) terminated with signal SIGABRT",
        says="aborted in native code (SIGABRT)",
        fix="Look above for lines of NCCL, gloo or glibc (`what():`) that say why.",
        torch="any",
    ),
    Failure(
        code="DDP907",
        name="stopped-by-torchrun",
        weight=Weight.WRAPPER,
        anchors=("exitcode",),
        pattern=r"exitcode\s*: ?-(?:15|2)\b",
        says="was stopped by its launcher after another rank had failed",
        fix=_LOOK,
        torch="1.13, 2.6, 2.13",
    ),
    Failure(
        code="DDP907",
        name="exit-status-1",
        weight=Weight.WRAPPER,
        anchors=("exitcode",),
        pattern=r"exitcode\s*: ?1\b",
        says="failed first, with exit status 1; why is not in this log",
        fix="Get the output of that rank: torchrun --log-dir DIR --redirects 3 keeps each rank's, "
        "or start with ddpdoctor run.",
        torch="1.13, 2.6, 2.13",
    ),
    Failure(
        code="DDP907",
        name="child-failed",
        weight=Weight.WRAPPER,
        anchors=("ChildFailedError", "ProcessExitedException", "ProcessRaisedException"),
        pattern=r"ChildFailedError|Process(?:Exited|Raised)Exception",
        says="failed, as its launcher noticed; why is not in this log",
        fix="Get the output of that rank: torchrun --log-dir DIR --redirects 3 keeps each rank's, "
        "or start with ddpdoctor run.",
        torch="1.13, 2.6, 2.13",
    ),
)
