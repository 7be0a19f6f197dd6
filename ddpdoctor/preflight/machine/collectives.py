"""A small job of real ranks: do the collectives give the right results here?"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.finding import Finding
from ddpdoctor.core.opening import whole
from ddpdoctor.preflight.check import Outcome, check, could_not_run, failure, judged, skipped
from ddpdoctor.preflight.deadline import Deadline, ended
from ddpdoctor.preflight.machine import versions
from ddpdoctor.preflight.machine.nccl import advice, why_no_nccl
from ddpdoctor.preflight.situation import Situation, visible_gpus
from ddpdoctor.preflight.words import duration

PROGRAM = Path(__file__).with_name("collective_ranks.py")

MOST_RANKS = 16
"""More are not started: every rank costs memory and, on few cores, time."""

TIMEOUT = 20.0
"""Seconds until a collective gives up."""

LIMIT = 3600.0
"""Seconds: each collective has its own, and ``--timeout`` is above them."""

WITHOUT_PEERS = (
    "Fix what the message names. Where transfers between GPUs are broken, NCCL works without "
    "them, more slowly.",
    "export NCCL_P2P_DISABLE=1",
)

ENDED_BY = "the rank was ended by"
"""How its program begins what it says of a rank that a signal ended."""

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
"""The place in a job that this is not; and the debug level, which DDP007 covers."""


@dataclass
class Answers:
    """What the ranks of one backend reported."""

    backend: str
    ranks: int
    done: set[int] = field(default_factory=set)
    last: dict[int, str] = field(default_factory=dict)
    """The last thing that a rank did."""
    wrong: dict[int, list[str]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    status: int | None = None
    """The exit status of rank 0's process, as `subprocess` has it; None if it had to be ended."""
    stderr: str = ""
    seconds: float = 0.0
    rounds: int = 0
    """How often all the collectives were run."""

    @property
    def silent(self) -> bool:
        """Whether the time was over before any rank had even begun."""
        return self.status is None and not (self.last or self.wrong or self.errors)

    @property
    def right(self) -> int:
        """How many ranks ended with every result right."""
        return len(self.done - self.wrong.keys() - self.errors.keys())

    def read(self, line: str) -> None:
        """Take in a line that a rank wrote; anything else is ignored."""
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
    torch = versions.installed_torch()
    if torch is None:
        return skipped("torch is not installed")
    chosen = situation.chosen
    if situation.options.nnodes > 1 and (chosen is None or "gloo-nodes" in chosen):
        return skipped("the ranks of all nodes reduce together: gloo-nodes")
    wanted = [("gloo", min(situation.nproc, MOST_RANKS))]
    on_gpus = min(situation.nproc, situation.shared(visible_gpus), MOST_RANKS)
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
    if situation.nproc > MOST_RANKS:
        parts.append(f"the other {situation.nproc - MOST_RANKS} were not started")
    return judged("; ".join(parts), (each for backend in answers for each in _findings(backend)))


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the ranks inherit: the job's environment, less the place in a job."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _NOT_PASSED and not name.startswith(_LEFT_OUT)
    }
    # Counting GPUs must not open CUDA in the process that the ranks are forked from.
    kept["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # NCCL's errors are raised where a rank waits, which can then report them: else a thread of
    # torch ends the process, or it hangs.
    kept["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**kept, **threads, "PYTHONWARNINGS": "ignore"}


def run_ranks(situation: Situation, backend: str, ranks: int, soak: float = 0.0) -> Answers:
    """Run the ranks of one backend to their end, or to the deadline of the check.

    Args:
        situation: Of the check.
        backend: ``gloo`` or ``nccl``.
        ranks: How many.
        soak: Seconds for which the collectives are repeated.
    """
    answers = Answers(backend, ranks)
    began = time.monotonic()
    seconds = min(TIMEOUT * situation.options.scale, max(1.0, situation.deadline.left() - soak - 5))
    # gloo needs no GPU, and must not be held up by one, nor take its memory.
    own = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    with (
        # torch makes folders for its caches, which are not to stay.
        tempfile.TemporaryDirectory(prefix="ddpdoctor-check-") as folder,
        tempfile.TemporaryFile() as stderr,
    ):
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), backend, str(ranks), str(seconds), str(soak)],
            env={**environment(situation.environ), **own, "TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        with ended(process):
            _listen(process, answers, Deadline(situation.deadline.left() - 1, situation.deadline))
            answers.status = process.poll()
            if answers.status is not None and answers.status < 0:
                name = signal.Signals(-answers.status).name
                answers.errors.setdefault(0, f"{ENDED_BY} {name}")
            answers.seconds = time.monotonic() - began
        stderr.seek(0)
        answers.stderr = stderr.read().decode("utf-8", "replace")
    return answers


def _listen(process: subprocess.Popen[bytes], answers: Answers, deadline: Deadline) -> None:
    """Read what the ranks write until they end, one has failed, or the deadline is over."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    os.set_blocking(descriptor, False)
    buffer = b""
    until = float("inf")
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while deadline.left() > 0 and time.monotonic() < until:
            if not selector.select(min(0.1, deadline.left())):
                continue
            chunk = os.read(descriptor, 65536)
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, min(2.0, deadline.left())))
                return
            buffer += chunk
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                answers.read(line.decode("utf-8", "replace"))
            if answers.errors:
                # What the others will say a timeout later is a consequence.
                until = min(until, time.monotonic() + 1.0)


def _findings(answers: Answers) -> Iterator[Finding]:
    name = "NCCL" if answers.backend == "nccl" else answers.backend
    if answers.right == answers.ranks:
        return
    missing = sorted(set(range(answers.ranks)) - answers.done)
    if answers.wrong:
        rank, problems = min(answers.wrong.items())
        message = f"{name} gives wrong results: rank {rank}, {problems[0]}"
        evidence = [
            f"rank {each}: {', '.join(wrong)}" for each, wrong in sorted(answers.wrong.items())[:4]
        ]
        ranks = tuple(sorted(answers.wrong))
    elif answers.errors:
        # The first one; what the others say of a rank that was ended is a consequence.
        rank, error = min(answers.errors.items(), key=lambda each: ENDED_BY not in each[1])
        message = f"{name} fails between ranks of this machine: rank {rank}: {error}"
        evidence = []
        ranks = tuple(sorted(answers.errors))
    else:
        message = f"{name} hangs: {len(missing)} of {answers.ranks} ranks did not finish"
        evidence = [
            f"the last step of rank {rank}: {answers.last.get(rank, 'it started')}"
            for rank in missing[:4]
        ]
        ranks = tuple(missing)
    evidence += _said(answers.stderr)
    fix, paste = (
        advice(" ".join([message, *evidence]), WITHOUT_PEERS)
        if name == "NCCL"
        else (
            "Fix what the message names; the other checks may have found the cause. For gloo's own "
            "messages:",
            GLOO_MESSAGES,
        )
    )
    yield failure(
        message, ranks=ranks, evidence=tuple(evidence), fix=fix, paste=paste, about=answers.backend
    )


def _said(stderr: str) -> list[str]:
    """The last lines that the ranks wrote, NCCL's warnings before all others."""
    lines = [line[:200] for line in stderr.splitlines() if line.strip()]
    warnings = [line for line in lines if "NCCL WARN" in line]
    # torch prints C++ stacks.
    return warnings[-3:] or [line for line in lines if not line.startswith("frame #")][-3:]
