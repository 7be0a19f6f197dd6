"""The collective self-test: start real ranks of `ranks.py`, and judge their results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.finding import Finding
from ddpdoctor.core.formatting import GIB, binary_size, count, duration
from ddpdoctor.core.opening import whole
from ddpdoctor.preflight.check import Outcome, check, could_not_run, failure, judged, skipped
from ddpdoctor.preflight.machine import software
from ddpdoctor.preflight.machine.gpus import chosen, none_here
from ddpdoctor.preflight.protocol.messages import RankResult, Stage
from ddpdoctor.preflight.situation import Deadline, Situation, ended, visible_gpus
from ddpdoctor.run.records.typed_json import decoder

# -- NCCL


NCCL_MEMORY = 3 * GIB
"""Bytes that have to be free on each GPU. A CUDA context takes half a GiB, and NCCL's buffers up to
one and a half for eight GPUs."""


def why_no_nccl(situation: Situation, ranks: int, *, nodes: int = 1) -> str:
    """Return why NCCL is not tested with so many ranks on this machine; empty if it can be.

    Each needs a GPU. NCCL does not connect MIG instances across nodes.
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
        "The NVSwitch fabric is not ready: its manager has to run, in the driver's version.",
        "sudo systemctl restart nvidia-fabricmanager",
    ),
    (
        ("no kernel image is available",),
        "This torch is not built for this GPU: install one that is.",
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
"""Words in an error, what to do about it, and a line to paste."""


def nccl_advice(error: str, otherwise: tuple[str, str]) -> tuple[str, str]:
    """Return what to do about an error and a line to paste, or ``otherwise`` if it is unknown."""
    for words, fix, paste in _NCCL_ADVICE:
        if any(word in error for word in words):
            return fix, paste
    return otherwise


# -- the ranks of one machine


PROGRAM = Path(__file__).with_name("ranks.py")
"""Started by its path. As a module it would import all checks before torch, in every rank."""

MAX_RANKS = 16  # The most ranks to start: each costs memory and, on few cores, time
TIMEOUT = 20.0  # Seconds until a collective gives up

LIMIT = 3600.0
"""Seconds for this check. Each collective has its own limit, and ``--timeout`` is above them."""

WITHOUT_PEERS = (
    "Fix what the message names. Where transfers between GPUs are broken, NCCL works without "
    "them, more slowly.",
    "export NCCL_P2P_DISABLE=1",
)

ENDED_BY = "the rank was ended by"  # How the program reports a rank that a signal ended

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


@dataclass
class Answers:
    """What the ranks of one backend reported.

    Attributes:
        last: What each rank did last.
        status: Exit status of the process of rank 0; None if it had to be killed.
        rounds: How often all collectives were run.
    """

    backend: str
    ranks: int
    done: set[int] = field(default_factory=set)
    last: dict[int, str] = field(default_factory=dict)
    wrong: dict[int, list[str]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    status: int | None = None
    stderr: str = ""
    seconds: float = 0.0
    rounds: int = 0

    @property
    def silent(self) -> bool:
        """Whether the time was over before any rank had begun."""
        return self.status is None and not (self.last or self.wrong or self.errors)

    @property
    def right(self) -> int:
        """How many ranks ended with every result right."""
        return len(self.done - self.wrong.keys() - self.errors.keys())

    def read(self, line: str) -> None:
        """Take in a line that a rank wrote. Ignore anything else."""
        try:
            message = opening.loads(line)
            rank = int(message["rank"])
        except (ValueError, TypeError, KeyError, OverflowError):
            return
        if "did" in message:
            self.last[rank] = str(message["did"])
        if "wrong" in message:
            self.wrong.setdefault(rank, []).append(str(message["wrong"]))
        if "error" in message:
            self.errors[rank] = str(message["error"])
        if message.get("done"):
            self.done.add(rank)
            self.rounds = max(self.rounds, whole(str(message.get("rounds", 1))))


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
    late = next((each for each in answers if each.silent), None)
    if late is not None:
        return could_not_run(
            f"not tested, for lack of CPU: torch was not ready within {late.seconds:.0f} s on "
            f"{late.ranks} ranks; --timeout gives it more time"
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
    """Return the job's environment without the place in a job, for the ranks."""
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
    """Run ranks of ``gloo`` or ``nccl`` to their end, or to the deadline of the check.

    ``soak`` is the seconds for which the collectives are repeated.
    """
    answers = Answers(backend, ranks)
    began = time.monotonic()
    limit = min(TIMEOUT * situation.options.scale, max(1.0, situation.deadline.left() - soak - 5))
    order = {"backend": backend, "ranks": ranks, "limit": limit, "soak": soak}
    # gloo needs no GPU, and must neither wait for one nor take its memory.
    own = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    with (
        # torch creates directories for its caches. They go when the ranks have ended.
        tempfile.TemporaryDirectory(prefix="ddpdoctor-check-") as folder,
        tempfile.TemporaryFile() as stderr,
    ):
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env={**environment(situation.environ), **own, "TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        with ended(process):
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
            _read(process, answers, Deadline(situation.deadline.left() - 1, situation.deadline))
            answers.status = process.poll()
            if answers.status is not None and answers.status < 0:
                name = signal.Signals(-answers.status).name
                answers.errors.setdefault(0, f"{ENDED_BY} {name}")
            answers.seconds = time.monotonic() - began
        stderr.seek(0)
        answers.stderr = stderr.read().decode("utf-8", "replace")
    return answers


def _read(process: subprocess.Popen[bytes], answers: Answers, deadline: Deadline) -> None:
    """Read what the ranks write until they end, one has failed, or the deadline is over."""
    assert process.stdout is not None
    # The thread has its own file, so that closing the process's does not wait for the thread.
    output = os.dup(process.stdout.fileno())

    def read() -> None:
        with open(output, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                answers.read(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    until = float("inf")
    while deadline.left() > 0 and time.monotonic() < until:
        reader.join(min(0.1, deadline.left()))
        if not reader.is_alive():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, min(2.0, deadline.left())))
            return
        if answers.errors:
            # What the other ranks report a timeout later is a consequence.
            until = min(until, time.monotonic() + 1.0)


def _findings(answers: Answers) -> Iterator[Finding]:
    if answers.right == answers.ranks:
        return
    nccl = answers.backend == "nccl"
    name = "NCCL" if nccl else answers.backend
    evidence = []
    if answers.wrong:
        guilty = sorted(answers.wrong.items())
        message = f"{name} gives wrong results: rank {guilty[0][0]}, {guilty[0][1][0]}"
        evidence = [f"rank {rank}: {', '.join(wrong)}" for rank, wrong in guilty[:4]]
        ranks = sorted(answers.wrong)
    elif answers.errors:
        # What other ranks report of a rank that was ended is a consequence.
        rank, error = min(answers.errors.items(), key=lambda each: ENDED_BY not in each[1])
        message = f"{name} fails between ranks of this machine: rank {rank}: {error}"
        ranks = sorted(answers.errors)
    else:
        ranks = sorted(set(range(answers.ranks)) - answers.done)
        message = f"{name} hangs: {len(ranks)} of {answers.ranks} ranks did not finish"
        evidence = [
            f"the last step of rank {rank}: {answers.last.get(rank, 'it started')}"
            for rank in ranks[:4]
        ]
    # The last lines that the ranks wrote, but no C++ stacks of torch. NCCL's warnings come first.
    lines = [line[:200] for line in answers.stderr.splitlines() if line.strip()]
    warnings = [line for line in lines if "NCCL WARN" in line]
    evidence += warnings[-3:] or [line for line in lines if not line.startswith("frame #")][-3:]
    advice = (
        "Fix what the message names; the other checks may have found the cause. For gloo's own "
    )
    fix, paste = advice + "messages:", GLOO_MESSAGES
    if nccl:
        fix, paste = nccl_advice(" ".join([message, *evidence]), WITHOUT_PEERS)
    yield failure(
        message,
        ranks=tuple(ranks),
        evidence=tuple(evidence),
        fix=fix,
        paste=paste,
        about=answers.backend,
    )


# -- this node's ranks of the test across nodes


LATE = "late"  # Not all ranks imported torch in time
BROKEN = "broken"  # A rank ended while it imported torch


class Ranks:
    """Processes that import torch while the network is tested, and then reduce together."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environment(environ)
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self, count: int) -> None:
        """Start so many processes."""
        for _ in range(count):
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    str(PROGRAM),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    env=self._environ,
                )
            )

    async def ready(self, limit: float) -> str:
        """Wait for the import of torch. Return nothing if it is done, else `LATE` or `BROKEN`."""

        async def imported(process: asyncio.subprocess.Process) -> str:
            assert process.stdout is not None
            try:
                return "" if await asyncio.wait_for(process.stdout.readline(), limit) else BROKEN
            except asyncio.TimeoutError:
                return LATE

        states = await asyncio.gather(*map(imported, self._processes))
        return next((each for each in (BROKEN, LATE) if each in states), "")

    async def reduce(self, orders: Sequence[Mapping[str, Any]], limit: float) -> list[RankResult]:
        """Give each process its order. Return their results within so many seconds, in order."""
        each = zip(self._processes, orders, strict=True)
        return list(await asyncio.gather(*(_reduce(*one, limit) for one in each)))

    async def stop(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        for process in self._processes:
            await process.wait()
        self._processes.clear()


async def _reduce(
    process: asyncio.subprocess.Process, order: Mapping[str, Any], limit: float
) -> RankResult:
    """Give a rank its order, and return its result as far as it came within so many seconds."""
    assert process.stdin is not None and process.stdout is not None
    ends = time.monotonic() + limit
    answer: dict[str, Any] = {"rank": order["rank"], "more": True}
    why, late = "", False
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await process.stdin.drain()
        while answer.get("more"):
            left = max(0.0, ends - time.monotonic())
            # An empty line, at the end of the output, raises ValueError.
            answer = opening.loads(await asyncio.wait_for(process.stdout.readline(), left))
    except asyncio.TimeoutError:
        why, late = f"no result within {limit:.0f} s", True
    except (OSError, ValueError):
        why = "the rank ended without a result"
        with contextlib.suppress(asyncio.TimeoutError):
            status = await asyncio.wait_for(process.wait(), 1)
            if status < 0:
                why = f"{ENDED_BY} {signal.Signals(-status).name}"
    result = decoder(RankResult)(answer)
    if not why:
        return result
    # What the rank knew before it ended or hung still counts. Only what it was doing failed.
    stages = result.stages
    if stages is None:
        return replace(result, ok=False, error=result.error or why, late=late)
    doing = answer["stages"].get("doing")
    if not isinstance(doing, dict):
        return result
    failed = replace(decoder(Stage)(doing), error=why)
    return replace(result, stages=replace(stages, stages=(*stages.stages, failed)))
