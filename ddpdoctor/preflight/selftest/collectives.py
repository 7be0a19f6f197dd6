"""The collective self-test: start real ranks of `ranks.py`, and judge their results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.finding import Finding
from ddpdoctor.core.formatting import GIB, binary_size, count, duration
from ddpdoctor.preflight.check import Outcome, check, could_not_run, failure, judged, skipped
from ddpdoctor.preflight.machine import software
from ddpdoctor.preflight.machine.gpus import chosen, none_here
from ddpdoctor.preflight.protocol.messages import RankResult, Stage
from ddpdoctor.preflight.selftest.ranks import ENDED_BY, SOAKING, TESTS
from ddpdoctor.preflight.situation import Deadline, Situation, ended, visible_gpus
from ddpdoctor.run.records.typed_json import decoder

# -- NCCL


NCCL_MEMORY = 3 * GIB
"""Bytes that have to be free on each GPU. A CUDA context takes half a GiB, and NCCL's buffers up to
one and a half for eight GPUs."""


def why_no_nccl(situation: Situation, ranks: int, *, nodes: int = 1) -> str:
    """Return why NCCL is not tested with these ranks on this machine; empty if it can be.

    Each rank needs a GPU. NCCL does not connect MIG instances across nodes.
    """
    torch = software.installed_torch()
    gpus = situation.shared(visible_gpus)
    if not gpus:
        return none_here(situation) or "CUDA sees no GPU"
    if torch is None or not torch.cuda:
        return "torch without CUDA"
    if gpus < ranks:
        return f"{count(gpus, 'GPU')} for {ranks} ranks"
    for gpu in chosen(situation)[:ranks]:
        name = f"GPU {gpu.device.index}"
        if gpu.device.mig:
            if nodes > 1:
                return f"{name} is partitioned (MIG)"
            continue
        if gpu.closed:
            return f"the compute mode of {name} keeps others out"
        if gpu.memory_total is None or gpu.memory_used is None:
            continue
        free = gpu.memory_total - gpu.memory_used
        if free < NCCL_MEMORY:
            needed = binary_size(NCCL_MEMORY)
            return f"{name} has {binary_size(free)} free, less than the {needed} it takes"
    return ""


_NCCL_ADVICE = (
    (
        ("shared memory", "/dev/shm", "No space left on device", "SIGBUS"),
        "NCCL connects the ranks of a machine by /dev/shm, which is too small or full; a container "
        "needs --shm-size or --ipc=host.",
        "df -h /dev/shm; ls -lS /dev/shm | head",
    ),
    (
        ("system not yet initialized", "system not initialized", "NotReady"),
        "The NVSwitch fabric is not ready: run its manager, in the driver's version.",
        "sudo systemctl restart nvidia-fabricmanager",
    ),
    (
        ("no kernel image is available",),
        "This torch is not built for this GPU: install a build that is.",
        "python -c 'import torch; print(torch.cuda.get_device_capability(), "
        "torch.cuda.get_arch_list())'",
    ),
    (
        ("out of memory", "busy or unavailable"),
        "Another process has the GPU, or most of its memory.",
        "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv",
    ),
    (
        ("invalid device ordinal", "No CUDA GPUs are available", "no CUDA-capable device"),
        "CUDA sees fewer GPUs than the driver: check CUDA_VISIBLE_DEVICES, MIG and the driver.",
        "python -c 'import torch; print(torch.cuda.device_count())'; nvidia-smi -L",
    ),
    (
        ("driver on your system is too old", "driver version is insufficient"),
        "Install a torch for the driver's CUDA, or a newer driver.",
        "nvidia-smi --query-gpu=driver_version --format=csv",
    ),
    (
        ("uncorrectable ECC", "unspecified launch failure", "illegal memory access"),
        "The GPU itself may be broken; see the driver's log.",
        "sudo dmesg -T | grep -i xid",
    ),
    (
        ("have NCCL built in",),
        "Install a torch that has NCCL, or let the job use gloo.",
        "python -c 'import torch.distributed as d; print(d.is_nccl_available())'",
    ),
)
"""Words in an error, its fix, and a line to paste."""


def nccl_advice(error: str, otherwise: tuple[str, str]) -> tuple[str, str]:
    """Return the fix of an error and a line to paste; ``otherwise`` if the error is unknown."""
    for words, fix, paste in _NCCL_ADVICE:
        if any(word in error for word in words):
            return fix, paste
    return otherwise


# -- the ranks of one machine


PROGRAM = Path(__file__).with_name("ranks.py")
"""Started by path: as a module it would import all checks before torch, in every rank."""

MAX_RANKS = 16  # Maximum number of ranks to start: each costs memory and, on few cores, time
TIMEOUT = 20.0  # Seconds until a collective gives up

LIMIT = 3600.0
"""Seconds for this check. Each collective has its own limit, and ``--timeout`` is above them."""

WITHOUT_PEERS = (
    "Fix what the message names. Where transfers between GPUs are broken, NCCL works without "
    "them, more slowly.",
    "export NCCL_P2P_DISABLE=1",
)

GLOO_MESSAGES = "TORCH_CPP_LOG_LEVEL=INFO ddpdoctor check --only collectives"

_LEFT_OUT = (
    *("TORCHELASTIC_", "PET_"),
    *("DDPDOCTOR_RUN_", "DDPDOCTOR_SUPERVISOR", "DDPDOCTOR_KEEPERS"),
)
_NOT_PASSED = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
        "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG",
    }
)  # fmt: skip
"""The variables of a place in a job, and the debug level, which DDP007 checks."""


@dataclass(frozen=True)
class Answers:
    """The answers of the ranks of one backend."""

    backend: str
    ranks: int
    unready: str  # Why not all of them have torch: `LATE` or `BROKEN`; empty if they do
    results: Sequence[RankResult]
    seconds: float
    stderr: str  # The output of the ranks and their libraries

    @property
    def right(self) -> int:
        """The number of ranks with only right results."""
        return sum(each.ok for each in self.results)

    @property
    def rounds(self) -> int:
        """The number of times all collectives were run."""
        return max((each.rounds for each in self.results), default=0)

    @property
    def too_little_time(self) -> str:
        """Why the result is unknown: ranks failed only because of busy cores."""
        if self.unready == LATE:
            return "torch was not ready"
        failed = [each for each in self.results if not each.ok]
        return f"{count(len(failed), 'rank')} did not finish" if starved(failed) else ""


@check("collectives", "DDP015", limit=LIMIT)
def collectives(situation: Situation) -> Outcome:
    """Collectives between ranks of this machine fail or give wrong results.

    What it finds
        A small real job, one process per rank, in which all_reduce, broadcast, all_gather, barrier
        or the gradient of a DDP step fails, hangs or gives a wrong result; with gloo, and with NCCL
        where each GPU has 3 GiB free.

    Why it is bad
        The job itself would fail, time out, or train on wrong gradients in the same way.

    How to fix it
        Follow torch's message, which is shown. If NCCL hangs or gives wrong results between GPUs of
        one machine, try `NCCL_P2P_DISABLE=1`: if that helps, an IOMMU or PCIe access control (ACS)
        breaks peer-to-peer transfers (DDP025, DDP026).

    Example
        Wrong: "rank 1 had a wrong result: all_reduce: element 0 is 0.0 instead of 1.0".
        Right: "8 of 8 ranks reduced correctly with gloo, 8 of 8 with NCCL".

    When it stays silent
        If every rank got every result right. At most 16 ranks are started; the output says if the
        job has more.
    """
    torch = software.installed_torch()
    if torch is None:
        return skipped("torch is not installed")
    chosen = situation.chosen
    if situation.options.nnodes > 1 and (chosen is None or "gloo-nodes" in chosen):
        return skipped("the ranks of all nodes reduce together: gloo-nodes")
    wanted = [("gloo", min(situation.nproc, MAX_RANKS))]
    on_gpus = min(situation.nproc, situation.shared(visible_gpus), MAX_RANKS)
    without = why_no_nccl(situation, on_gpus)
    if not without:
        wanted.append(("nccl", on_gpus))
    soak = situation.options.soak / len(wanted)
    answers = [run_ranks(situation, backend, ranks, soak) for backend, ranks in wanted]
    for each in answers:
        if late := each.too_little_time:
            return could_not_run(
                f"not tested, for lack of CPU: {late} within {each.seconds:.0f} s on "
                f"{count(each.ranks, 'rank')}; --timeout gives it more time"
            )
    gloo, *nccl = answers
    parts = [f"{gloo.right} of {gloo.ranks} ranks reduced correctly with gloo"]
    parts += [f"{each.right} of {each.ranks} with NCCL" for each in nccl]
    if soak:
        rounds = ", ".join(f"{each.rounds} with {each.backend}" for each in answers)
        parts.append(f"repeated for {duration(situation.options.soak)}: {rounds}")
    if without:
        parts.append(f"NCCL skipped: {without}")
    if situation.nproc > MAX_RANKS:
        parts.append(f"the other {situation.nproc - MAX_RANKS} were not started")
    return judged("; ".join(parts), (each for backend in answers for each in _findings(backend)))


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the job's environment for the ranks, without variables of a place in a job."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _NOT_PASSED and not name.startswith(_LEFT_OUT)
    }
    # Counting GPUs must not open CUDA in the process from which ranks are forked.
    kept["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Let NCCL raise its errors where a rank waits, so that it can report them. Otherwise a thread
    # of torch ends the process, or it hangs.
    kept["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**kept, **threads, "PYTHONWARNINGS": "ignore"}


def run_ranks(situation: Situation, backend: str, ranks: int, soak: float = 0.0) -> Answers:
    """Run ranks of ``gloo`` or ``nccl`` until they end, or until the deadline of the check.

    ``soak`` is the seconds for which the collectives are repeated.
    """
    began, left = time.monotonic(), situation.deadline.left()
    order = {
        "backend": backend, "tests": [each for each in TESTS if each != SOAKING], "stages": "",
        "host": "127.0.0.1", "port": 0, "first": 0, "ranks": ranks, "world": ranks,
        "limit": min(TIMEOUT * situation.options.scale, max(1.0, left - soak - 5)),
        "patience": left - 1, "soak": soak, "measure": False,
    }  # fmt: skip
    # gloo needs no GPU, and must neither wait for one nor take its memory.
    own = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    here = Ranks({**situation.environ, **own})

    async def results() -> tuple[str, Sequence[RankResult]]:
        deadline = Deadline(left - 1, situation.deadline)
        unready = await here.ready(deadline)
        return unready, [] if unready else await here.reduce(order, deadline, CONSEQUENCES_S)

    try:
        here.start()
        unready, found = asyncio.run(results())
    finally:
        stderr = here.stop()
    return Answers(backend, ranks, unready, found, time.monotonic() - began, stderr)


def _failure(answers: Answers, name: str) -> tuple[str, list[str], list[RankResult]]:
    """Return a message, the evidence, and the failed ranks."""
    failed = [each for each in answers.results if not each.ok]
    wrong = [each for each in failed if each.wrong]
    errors = [each for each in failed if each.error and not each.error.startswith(UNFINISHED)]
    if answers.unready:
        return "torch cannot be imported", [], failed
    if wrong:
        message = f"{name} gives wrong results: rank {wrong[0].rank}, {wrong[0].error}"
        return message, [f"rank {each.rank}: {each.error}" for each in wrong[:4]], wrong
    if errors:
        # What other ranks report about a rank that was ended is a consequence.
        first = min(errors, key=lambda each: ENDED_BY not in each.error)
        message = f"{name} fails between ranks of this machine: rank {first.rank}: {first.error}"
        return message, [], errors
    message = f"{name} hangs: {len(failed)} of {answers.ranks} ranks did not finish"
    last = [f"the last step of rank {each.rank}: {each.did or 'it started'}" for each in failed[:4]]
    return message, last, failed


def _findings(answers: Answers) -> Iterator[Finding]:
    if answers.right == answers.ranks:
        return
    nccl = answers.backend == "nccl"
    message, evidence, failed = _failure(answers, "NCCL" if nccl else answers.backend)
    # The last lines of the ranks without torch's C++ stacks. NCCL's warnings take precedence.
    lines = [line[:200] for line in answers.stderr.splitlines() if line.strip()]
    warnings = [line for line in lines if "NCCL WARN" in line]
    evidence += warnings[-3:] or [line for line in lines if not line.startswith("frame #")][-3:]
    advice = (
        "Fix what the message names; the other checks may have found the cause. For gloo's own "
    )
    fix, paste = advice + "messages:", GLOO_MESSAGES
    if answers.unready:
        fix, paste = "Read Python's error:", "python -c 'import torch.distributed'"
    elif nccl:
        fix, paste = nccl_advice(" ".join([message, *evidence]), WITHOUT_PEERS)
    yield failure(
        message,
        ranks=tuple(each.rank for each in failed),
        evidence=tuple(evidence),
        fix=fix,
        paste=paste,
        about=answers.backend,
    )


# -- start ranks, give them an order, and read their answers


LATE = "late"  # Not all ranks imported torch in time
BROKEN = "broken"  # Their process ended while it imported torch
UNFINISHED = "no result within"  # Begins the error of a rank that was still busy at the deadline

STARVED = 0.5
"""Share of time above which waits for a core, summed over all ranks, explain that they were late.
Each rank may have waited for another one that waited for a core."""

CONSEQUENCES_S = 1.0  # Seconds after which the ranks of one machine only repeat an error
POLL_S = 0.02


class Ranks:
    """The ranks of this machine. They import torch during other tests, then reduce."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environment(environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = self._over = False
        self._known: dict[int, dict[str, Any]] = {}

    def start(self) -> None:
        """Start the process from which the ranks are forked. It ends with the calling thread."""
        # torch creates directories for its caches. They are removed when the ranks have ended.
        self._folder = tempfile.TemporaryDirectory(prefix="ddpdoctor-check-")
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(os.getpid())],
            env={**self._environ, "TMPDIR": self._folder.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        # The thread has its own file, so that closing the process's does not wait for the thread.
        output = os.dup(self._process.stdout.fileno())
        threading.Thread(target=self._follow, args=(output,), daemon=True).start()

    def _follow(self, output: int) -> None:
        with open(output, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self.read(line)
        self._over = True

    def read(self, line: str) -> None:
        """Process a line that a rank wrote. Ignore any other line."""
        try:
            message = opening.loads(line)
            self._ready = self._ready or bool(message.get("ready"))
            self._over = self._over or bool(message.get("over"))
            known = self._known.setdefault(int(message["rank"]), {})
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError):
            return
        # What a rank says after its first error is a consequence.
        known.update(message if "error" not in known else {**message, "error": known["error"]})

    async def ready(self, deadline: Deadline) -> str:
        """Wait for the import of torch. Return an empty text, or `LATE` or `BROKEN`."""
        while not self._ready and not self._over and deadline.left() > 0:
            await asyncio.sleep(POLL_S)
        return "" if self._ready else BROKEN if self._over else LATE

    async def reduce(
        self, order: Mapping[str, Any], deadline: Deadline, after_error: float = math.inf
    ) -> list[RankResult]:
        """Give the ranks their order. Return the results known at the deadline.

        Wait for other ranks at most ``after_error`` seconds after the first error.
        """
        assert self._process is not None and self._process.stdin is not None
        began, until = time.monotonic(), math.inf
        ranks = range(order["first"], order["first"] + order["ranks"])
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        while deadline.left() > 0 and time.monotonic() < until and not self._over:
            known = [self._known.get(rank, {}) for rank in ranks]
            if all({"done", "ended"} & each.keys() for each in known):
                break
            if until == math.inf and any("ended" in each for each in known):
                until = time.monotonic() + after_error
            await asyncio.sleep(POLL_S)
        late = deadline.left() <= 0
        why = f"{UNFINISHED} {time.monotonic() - began:.0f} s" if late else ""
        if self._over:
            why = "the rank ended without a result"
        return [_result(rank, self._known.get(rank, {}), why, late) for rank in ranks]

    def stop(self) -> str:
        """Kill all processes. Return what they wrote to stderr."""
        if self._process is None:
            return ""
        with ended(self._process):
            pass
        self._process = None
        self._stderr.seek(0)
        with self._stderr, self._folder:
            return self._stderr.read().decode("utf-8", "replace")


def starved(failed: Sequence[RankResult]) -> bool:
    """Return whether ranks failed only for lack of time, caused by a lack of CPU."""
    late = [each.late for each in failed if each.error]
    return bool(late) and all(late) and sum(each.waited for each in failed) > STARVED


def _result(rank: int, known: Mapping[str, Any], why: str, late: bool) -> RankResult:
    """Return the known results of a rank, with the reason why others are missing."""
    result = decoder(RankResult)({**known, "rank": rank})
    if "done" in known:
        return result
    why = result.error or why
    if not result.ok:
        return replace(result, error=why, late=late or result.late)
    # What the rank knew before it ended or hung still counts. Only what it was doing failed.
    stages = result.stages
    doing = known["stages"].get("doing") if stages is not None else None
    if stages is None or not isinstance(doing, dict):
        return result
    failed = replace(decoder(Stage)(doing), error=why or UNFINISHED)
    return replace(result, stages=replace(stages, stages=(*stages.stages, failed)))
