"""Jobs that train on a GPU: watching changes nothing, and what goes wrong there is named.

Where there is one GPU, the ranks of these jobs share it (`tests/jobs/on_gpu.py`).
"""

from __future__ import annotations

import json
import re

import pytest

from ddpdoctor.run.records.process import FaultRecord
from tests.conftest import JOBS, Doctor, Result
from tests.gpu.machine import GPUS, needs_gpu, needs_nccl

pytestmark = [needs_gpu, needs_nccl]

JOB = JOBS / "on_gpu.py"
ONE = ("--nproc-per-node", "1", str(JOB))
TWO = ("--nproc-per-node", "2", str(JOB))

HASHES = 5 << 20
"""Bytes of GPU memory that hashes of parameters may take beside the job's."""

BESIDE = {"DDP203"} if GPUS < 2 else set()
"""What is true of ranks that share a GPU, whatever else they do."""


def line_of(what: str) -> int:
    lines = JOB.read_text().splitlines()
    return next(at for at, line in enumerate(lines, 1) if line.endswith(f"# guilty: {what}"))


def findings(result: Result) -> list[str]:
    return [code for code in result.codes if code not in BESIDE]


def unharmed(result: Result) -> None:
    assert result.status == 0, result.stderr
    assert findings(result) == [], result.stderr
    assert not [fault for rank in result.run.ranks for fault in rank.records.of(FaultRecord)]


# -- nothing is changed


@pytest.mark.parametrize("more", [(), ("--compile", "default"), ("--graph",)], ids=str)
def test_losses_draws_and_memory_are_the_same(doctor: Doctor, more: tuple[str, ...]) -> None:
    words = (*ONE, "--losses", *more)
    watched, plain = doctor.run(*words), doctor.torchrun(*words)
    assert plain.status == 0, plain.stderr
    unharmed(watched)
    ours, theirs = (each.stdout.splitlines() for each in (watched, plain))
    assert len(theirs) >= 20
    if "--graph" not in more:
        memory = [int(lines.pop().removeprefix("memory ")) for lines in (ours, theirs)]
        assert memory[0] - memory[1] <= HASHES
    assert ours == theirs


def test_a_step_asks_cuda_for_no_wait_and_no_memory(doctor: Doctor) -> None:
    """As the profiler sees it; what is counted may differ by what a line of the journal takes."""
    words = (*ONE, "--steps", "100", "--profile")
    watched, plain = doctor.run(*words), doctor.torchrun(*words)
    unharmed(watched)
    ours, theirs = (json.loads(each.stdout.splitlines()[-1]) for each in (watched, plain))
    waits = {name for name in {*ours, *theirs} if "Synchronize" in name or "Malloc" in name}
    assert "cudaDeviceSynchronize" in waits
    assert {name: ours.get(name) for name in waits} == {name: theirs.get(name) for name in waits}


def test_ranks_of_nccl(doctor: Doctor) -> None:
    result = doctor.run(*TWO, "--steps", "60")
    unharmed(result)
    for rank in result.run.ranks:
        assert rank.opened.backend.startswith("nccl")
        assert len(rank.steps) >= 60


# -- what goes wrong


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("memory", "DDP928"),
        ("assert", "DDP929"),
        ("wild", "DDP930"),
        ("ordinal", "DDP927"),
        ("devices", "DDP941"),
        ("fork", "DDP937"),
        ("exception", "DDP901"),
    ],
)
def test_a_failure_is_named_with_its_line(doctor: Doctor, fault: str, code: str) -> None:
    words = (*ONE, "--rank", "0", "--fail", fault)
    result = doctor.run(*words)
    assert result.status != 0
    assert findings(result) == [code], result.stderr
    assert f"{JOB.name}:{line_of(fault)}" in result.stderr
    # From the log that torchrun leaves, without ddpdoctor, too.
    assert read(doctor, doctor.torchrun(*words)) == [code]


def test_two_ranks_on_one_gpu(doctor: Doctor) -> None:
    if GPUS > 1:
        pytest.skip(f"{GPUS} GPUs, one for each rank")
    words = (*TWO, "--same-host")
    assert "DDP203" in doctor.run(*words).codes
    assert read(doctor, doctor.torchrun(*words)) == ["DDP203"]


def test_a_rank_that_is_killed(doctor: Doctor) -> None:
    result = doctor.run(*TWO, "--fail", "kill")
    assert findings(result) == ["DDP902"], result.stderr
    assert "rank 1" in result.ours


@pytest.mark.parametrize(
    ("fault", "code"), [("asleep", "DDP802"), ("more", "DDP803"), ("size", "DDP803")]
)
def test_a_hang_of_nccl_is_named_with_its_line(doctor: Doctor, fault: str, code: str) -> None:
    result = doctor.run("--hang-after", "10", "--kill-on-hang", *TWO, "--fail", fault)
    assert findings(result)[:1] == [code], result.stderr
    assert f"{JOB.name}:{line_of(fault)}" in result.stderr


def test_a_rank_that_skips_a_call_is_named_with_its_condition(doctor: Doctor) -> None:
    result = doctor.run("--hang-after", "10", "--kill-on-hang", *TWO, "--metric")
    assert findings(result)[:1] == ["DDP803"], result.stderr
    assert re.search(r"rank 1 skipped all_reduce #\d+ \(1 float, default group\)", result.ours)
    assert f"{JOB.name}:{line_of('skip')}" in result.stderr


@pytest.mark.parametrize("timed", ["0", "1"])
def test_a_kernel_that_does_not_end_is_not_the_network(doctor: Doctor, timed: str) -> None:
    words = ("--hang-after", "10", "--kill-on-hang", *TWO, "--fail", "kernel")
    result = doctor.run(*words, env={"TORCH_NCCL_ENABLE_TIMING": timed})
    assert findings(result)[:1] == ["DDP802"], result.stderr
    said = " ".join(result.ours.split())
    assert "GPU of rank 1 never came to" in said or "for its GPU, which is still at" in said
    assert result.status == 4, result.stderr


def test_a_time_out_of_nccl_is_read_from_the_log(doctor: Doctor) -> None:
    result = doctor.torchrun(*TWO, "--fail", "asleep", "--timeout", "10")
    assert result.status != 0
    assert "Watchdog caught collective operation timeout" in result.stderr
    log = doctor.write("job.log", result.stdout + result.stderr)
    assert "rank 1" in doctor.cli("report", "--log", str(log)).stdout


def test_a_slow_rank_is_named_with_its_line(doctor: Doctor) -> None:
    result = doctor.run(*TWO, "--fail", "slow", "--steps", "200")
    assert result.status == 0, result.stderr
    assert findings(result) == ["DDP610"], result.stderr
    assert re.search(r"rank 1\b", result.ours)
    assert f"{JOB.name}:{line_of('slow')}" in result.stderr


def read(doctor: Doctor, failed: Result) -> list[str]:
    log = doctor.write("job.log", failed.stdout + failed.stderr)
    told = doctor.cli("report", "--log", str(log), "--json")
    return [json.loads(line)["code"] for line in told.stdout.splitlines()]
