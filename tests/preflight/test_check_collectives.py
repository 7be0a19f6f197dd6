"""The self-test of ``ddpdoctor check``: real ranks, right, wrong, hung, and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpdoctor.preflight.machine import software
from ddpdoctor.preflight.selftest.collectives import (
    WITHOUT_PEERS,
    environment,
    nccl_advice,
    why_no_nccl,
)
from ddpdoctor.preflight.situation import Once, Situation, gpu_facts
from ddpdoctor.system.nvml import Device, GpuFacts, Health
from tests.conftest import LIMIT, TOKEN, Doctor, marked

CHECK = (sys.executable, "-m", "ddpdoctor", "check", "--only", "collectives")

WRONG = """
    import torch.distributed as dist
    real = dist.all_reduce
    def all_reduce(tensor, *args, **kwargs):
        work = real(tensor, *args, **kwargs)
        if dist.get_rank() == 1 and len(tensor) > 7:
            tensor[7] += 1
        return work
    dist.all_reduce = all_reduce
"""
"""On rank 1 an element of each sum is one too large, as from broken memory."""

SILENT = """
    import time
    import torch.distributed as dist
    real = dist.broadcast
    def broadcast(tensor, *args, **kwargs):
        if dist.get_rank() == 1:
            time.sleep(3600)
        return real(tensor, *args, **kwargs)
    dist.broadcast = broadcast
"""
"""Rank 1 never comes to the broadcast."""


DIES = """
    import os, signal
    import torch.distributed as dist
    real = dist.broadcast
    def broadcast(tensor, *args, **kwargs):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(tensor, *args, **kwargs)
    dist.broadcast = broadcast
"""
"""Rank 1 is ended, as where memory is short."""

TALKS = """
    import os
    import torch.distributed as dist
    real = dist.broadcast
    def broadcast(tensor, *args, **kwargs):
        os.write(1, b"node0:77 [0] NCCL INFO Channel 00/02 : 0 1 and no end of the li")
        return real(tensor, *args, **kwargs)
    dist.broadcast = broadcast
"""
"""A library prints to stdout in blocks that end anywhere, as NCCL does with NCCL_DEBUG=INFO."""


def fault(doctor: Doctor, source: str) -> dict[str, str]:
    """An environment in which torch has a fault, for the ranks that fork from it."""
    body = f"import sys\nif 'ranks.py' in ' '.join(sys.orig_argv):{source}"
    folder = doctor.directory / "fault"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(body)
    return {"PYTHONPATH": str(folder)}


def record(result: Any) -> Any:
    (told,) = json.loads(result.stdout)["checks"]
    return told


@pytest.mark.slow
def test_three_ranks_reduce_correctly_whatever_the_environment_says(doctor: Doctor) -> None:
    """The place of another job in the environment, and a level that breaks DDP, are not passed."""
    env = {
        "RANK": "7", "WORLD_SIZE": "99", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29999",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "OMP_NUM_THREADS": "2",
    }  # fmt: skip
    result = doctor.run(*CHECK, "--json", "--nproc-per-node", "3", env=env, watch=False)
    assert result.stderr == ""
    told = record(result)
    assert (result.status, told["status"], told["findings"]) == (0, "pass", [])
    assert told["detail"] == ("3 of 3 ranks reduced correctly with gloo; NCCL skipped: no GPU")


def test_a_wrong_sum_is_seen_on_the_rank_that_has_it(doctor: Doctor) -> None:
    result = doctor.run(*CHECK, "--json", env=fault(doctor, WRONG), watch=False)
    told = record(result)
    assert result.status == 2
    assert told["detail"].startswith("1 of 2 ranks reduced correctly with gloo")
    (finding,) = told["findings"]
    assert finding["ranks"] == [1]
    assert finding["message"] == (
        "gloo gives wrong results: rank 1, all_reduce: element 7 is 16.0 instead of 15.0"
    )


@pytest.mark.slow
def test_a_rank_that_a_signal_ends_is_told_at_once(doctor: Doctor) -> None:
    result = doctor.run(*CHECK, "--json", env=fault(doctor, DIES), watch=False)
    (finding,) = record(result)["findings"]
    assert result.status == 2
    assert finding["message"].endswith("rank 1: the rank was ended by SIGKILL")


@pytest.mark.slow
def test_what_a_library_prints_is_not_mixed_with_the_answers(doctor: Doctor) -> None:
    result = doctor.run(*CHECK, "--json", env=fault(doctor, TALKS), watch=False)
    told = record(result)
    assert (result.status, told["findings"]) == (0, []), told


def test_what_helps_follows_from_the_errors_words() -> None:
    shm = "NCCL error ... Last error: Error while creating shared memory segment /dev/shm/nccl-Ab1"
    assert "--shm-size" in nccl_advice(shm, WITHOUT_PEERS)[0]
    assert (
        "nvidia-fabricmanager"
        in nccl_advice("CUDA error: system not yet initialized", WITHOUT_PEERS)[1]
    )
    assert nccl_advice("NCCL gives wrong results: rank 1", WITHOUT_PEERS) == WITHOUT_PEERS


def gpus(used: int, total: int = 80, *, mode: int = 0, mig: bool = False) -> Situation:
    """Two GPUs, of which the second one is like this, in GiB."""
    devices = [Device(i, f"GPU-{i}", "H100", "", mig and i == 1) for i in (0, 1)]
    facts = [
        Health(each, memory_total=total << 30, memory_used=gib << 30, compute_mode=mode,
               instances=("MIG-1",) if each.mig else ())
        for each, gib in zip(devices, (0, used), strict=True)
    ]  # fmt: skip
    once = Once()
    once.put(gpu_facts, GpuFacts(gpus=tuple(facts)))
    return Situation(environ={}, once=once)


def test_nccl_takes_no_memory_where_somebody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = software.Torch(Path("torch"), "2.13.0", "12.8")
    monkeypatch.setattr(software, "installed_torch", lambda: cuda)
    assert why_no_nccl(gpus(used=70), 2) == ""
    assert why_no_nccl(gpus(used=78), 2) == "GPU 1 has 2 GiB free, less than the 3 GiB it takes"
    assert why_no_nccl(gpus(used=78), 1) == ""
    assert why_no_nccl(gpus(used=0), 3) == "2 GPUs for 3 ranks"
    assert why_no_nccl(gpus(used=0, mode=2), 2) == "the compute mode of GPU 0 keeps others out"
    assert why_no_nccl(gpus(used=0, mig=True), 1, nodes=2) == ""
    without = software.Torch(Path("torch"), "2.13.0")
    monkeypatch.setattr(software, "installed_torch", lambda: without)
    assert why_no_nccl(gpus(used=0), 2) == "torch without CUDA"


def test_too_little_time_is_no_failure(doctor: Doctor) -> None:
    result = doctor.run(*CHECK, "--json", "--timeout", "1", watch=False)
    told = record(result)
    assert (result.status, told["status"]) == (4, "could not run")
    assert told["detail"].endswith("--timeout gives it more time")


@pytest.mark.slow
def test_what_gloo_says_is_passed_on(doctor: Doctor) -> None:
    result = doctor.run(*CHECK, "--json", env={"GLOO_SOCKET_IFNAME": "eth99"}, watch=False)
    (finding,) = record(result)["findings"]
    assert "Unable to find address for: eth99" in finding["message"]
    assert result.status == 2


@pytest.mark.slow
def test_ranks_that_hang_are_named_and_ended(doctor: Doctor) -> None:
    words = ("--json", "--timeout", "30")
    result = doctor.run(*CHECK, *words, env=fault(doctor, SILENT), watch=False)
    told = record(result)
    assert told["status"] == "fail"
    (finding,) = told["findings"]
    words_of_it = " ".join([finding["message"], *finding["evidence"]])
    assert "all_reduce" in words_of_it or "rank 0" in words_of_it


@pytest.mark.parametrize(
    ("number", "processes"),
    [
        (signal.SIGINT, 3),
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGTERM, 3, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 3, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_leaves_nothing_behind(
    doctor: Doctor, token: str, number: signal.Signals, processes: int
) -> None:
    """Whether the ranks are being started, forked, or hang."""
    env = doctor.environment(fault(doctor, SILENT))
    with subprocess.Popen(
        CHECK, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        deadline = time.monotonic() + LIMIT
        while len(ranks(token)) < processes and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(ranks(token)) >= processes
        process.send_signal(number)
        process.wait(LIMIT)
        deadline = time.monotonic() + LIMIT
        while marked(token) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marked(token) == []
        assert process.stderr is not None
        assert process.stderr.read() == b""
    wanted = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert process.returncode == wanted[number]


def ranks(token: str) -> list[psutil.Process]:
    """The processes of the self-test."""
    found = []
    for process in marked(token):
        try:
            if any("ranks.py" in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_the_ranks_inherit_what_a_job_would() -> None:
    kept = environment(
        {"GLOO_SOCKET_IFNAME": "eth1", "TORCHELASTIC_RUN_ID": "x", "RANK": "1", TOKEN: "t"}
    )
    assert kept["GLOO_SOCKET_IFNAME"] == "eth1" and kept[TOKEN] == "t"
    assert not {"TORCHELASTIC_RUN_ID", "RANK"} & kept.keys()


def test_the_check_itself_never_imports_torch(doctor: Doctor) -> None:
    code = (
        "import sys\n"
        "from ddpdoctor.cli import main\n"
        "status = main(['check', '-v', '--checkpoint-dir', '.', '--', sys.argv[1]])\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'torch', 'textual', 'debugpy'}, loaded\n"
    )
    script = doctor.write("train.py", "import torch, torch.distributed as dist\n")
    done = subprocess.run(
        [sys.executable, "-c", code, str(script)],
        cwd=doctor.directory,
        env=doctor.environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "2 of 2 ranks reduced correctly" in done.stdout
    assert "its 1 imports are there" in done.stdout
    assert os.listdir(doctor.directory) == ["train.py"]
