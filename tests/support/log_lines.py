"""Lines of logs of jobs, and what is said of such a log."""

from __future__ import annotations

from ddpdoctor.core.finding import Finding
from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings

TIMEOUT = (
    "[rank{0}]:[E1122 10:30:21.201 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum={1}, OpType={2}, NumelIn={3}, NumelOut={3}, "
    "Timeout(ms)=600000) ran for 600021 milliseconds before timing out.\n"
)
BANNER = (
    "*****************************************\n"
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid "
    "your system being overloaded, please further tune the variable\n"
)
FAILED = (
    '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/job/a.py", line 5, in a\n'
    "[rank1]: ValueError: {}\n"
    "E1122 10:30:21.207000 12 torch/distributed/elastic/multiprocessing/api.py:869] failed "
    "(exitcode: 1) local_rank: 1 (pid: 4711) of binary: /usr/bin/python\n"
)
RAISED = (
    'Traceback (most recent call last):\n  File "/job/a.py", line 9, in <module>\n    main()\n{}\n'
)
STEPS = "".join(f"epoch 1 step {step} loss 0.5\n" for step in range(8))
SUMMARY = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n"
    "  exitcode  : 1 (pid: {})\n"
)
CANCELLED = "slurmstepd: error: *** JOB 4711 ON node3 CANCELLED AT 2024-05-01T12:00:00 ***\n"


def one(text: str) -> Finding:
    (found,) = findings(read("job.log", [text.encode()]))
    return found


def timeouts(**places: tuple[int, str, int]) -> str:
    return "".join(TIMEOUT.format(rank[1:], *place) for rank, place in places.items())
