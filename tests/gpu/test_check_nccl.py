"""``ddpdoctor check`` with NCCL, on real GPUs. Each test says why it was skipped where it was."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest

from ddpdoctor.preflight.selftest.collectives import PROGRAM
from ddpdoctor.system.nvml import read_health
from tests.conftest import LIMIT, TOKEN, Doctor, Result, marked
from tests.gpu.machine import (
    GPUS,
    SLACK,
    compute_processes,
    needs_gpu,
    needs_nccl,
    needs_two,
    smi,
    used,
    wait_until_used,
)
from tests.preflight.test_check_collectives import DIES, SILENT, WRONG, fault

pytestmark = [needs_gpu, needs_nccl]

PARTED = any(gpu.device.mig for gpu in read_health().gpus)

RANKS = min(GPUS, 16)
"""More are not started by the self-test."""

SECONDS = 400
"""Enough for a first import of torch from a slow disk."""


def check(doctor: Doctor, *words: str, env: dict[str, str] | None = None) -> Result:
    command = (sys.executable, "-m", "ddpdoctor", "check", "--timeout", "300", *words)
    return doctor.run(*command, env=env, watch=False, timeout=SECONDS)


def outcomes(text: str) -> dict[str, Any]:
    return {each["check"]: each for each in json.loads(text)["checks"]}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def idle() -> None:
    """Skip a test that another job on the GPUs would disturb."""
    busy = [row["index"] for row in smi("index", "memory.used") if int(row["memory.used"]) > 2048]
    if busy:
        pytest.skip(f"somebody uses GPU {', '.join(busy)}")


@dataclass
class Checked:
    """A whole check of this machine, and its GPUs before and after."""

    result: Result
    before: list[int]
    after: list[int]
    processes: set[int]

    @property
    def told(self) -> dict[str, Any]:
        return outcomes(self.result.stdout)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    token = f"gpus-{os.getpid()}"
    doctor = Doctor(tmp_path_factory.mktemp("checked"), token)
    before, processes = used(), compute_processes()
    result = check(doctor, "--json", "--nproc-per-node", str(RANKS))
    assert marked(token) == []
    after = wait_until_used(before)
    return Checked(result, before, after, compute_processes() - processes)


def test_all_gpus_reduce_with_nccl(checked: Checked) -> None:
    told = checked.told
    assert told["collectives"]["status"] == "pass", told["collectives"]
    assert told["collectives"]["detail"] == (
        f"{RANKS} of {RANKS} ranks reduced correctly with gloo; {RANKS} of {RANKS} with NCCL"
    )


def test_every_check_came_to_an_outcome(checked: Checked) -> None:
    told = checked.told
    assert checked.result.stderr == ""
    assert {name for name, each in told.items() if each["status"] == "could not run"} == set()
    for name in ("gpu-driver", "gpu-count"):
        assert told[name]["status"] == "pass", told[name]
    # A healthy machine; whoever has a sick one reads here what it has.
    gpus = {name: each for name, each in told.items() if name.startswith("gpu-")}
    failed = {name: each["findings"] for name, each in gpus.items() if each["status"] == "fail"}
    assert failed == {}
    assert {name for name, each in gpus.items() if each["status"] == "skipped"} <= {
        *(("gpu-peers",) if GPUS < 2 else ()), "gpu-acs", *(("gpu-memory",) if PARTED else ()),
    }  # fmt: skip


def test_the_exit_status_follows_from_the_outcomes(checked: Checked) -> None:
    statuses = {each["status"] for each in checked.told.values()}
    wanted = 2 if "fail" in statuses else 1 if "warn" in statuses else 0
    assert checked.result.status == wanted
    assert json.loads(checked.result.stdout)["exit_status"] == wanted


def test_the_gpus_are_as_they_were(checked: Checked) -> None:
    """As far as nobody else came or went in the meantime."""
    if checked.processes:
        pytest.skip(f"others came: {checked.processes}")
    grown = [
        (index, was, now)
        for index, (was, now) in enumerate(zip(checked.before, checked.after, strict=True))
        if now > was + SLACK
    ]
    assert grown == []


def test_the_table_fits_a_terminal(doctor: Doctor) -> None:
    result = check(doctor, "--skip", "collectives", env={"COLUMNS": "80", "LANG": "C"})
    assert result.status in (0, 1, 2) and result.stderr == ""
    assert f"of {len(used())} GPUs answer" in result.stdout
    assert "Traceback" not in result.stdout


def test_what_nccl_prints_does_no_harm(doctor: Doctor) -> None:
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL"}
    result = check(doctor, "--json", "--only", "collectives", env=env)
    told = outcomes(result.stdout)["collectives"]
    assert told["status"] == "pass", told


def test_ranks_without_a_gpu_are_warned_of_and_the_others_tested(doctor: Doctor) -> None:
    words = ("--only", "collectives,gpu-count", "--nproc-per-node", str(GPUS + 1))
    result = check(doctor, "--json", *words)
    told = outcomes(result.stdout)
    assert result.status == 1
    assert told["gpu-count"]["status"] == "warn"
    assert f"; {RANKS} of {RANKS} with NCCL" in told["collectives"]["detail"]


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_left_alone(doctor: Doctor, hidden: str) -> None:
    words = ("--only", "collectives,gpu-count,gpu-memory,versions")
    result = check(doctor, "--json", *words, env={"CUDA_VISIBLE_DEVICES": hidden})
    told = outcomes(result.stdout)
    assert told["collectives"]["status"] == "pass"
    assert "; NCCL skipped: CUDA_VISIBLE_DEVICES hides all" in told["collectives"]["detail"]
    assert told["gpu-count"]["status"] == told["gpu-memory"]["status"] == "skipped"


def test_the_process_that_ranks_are_forked_from_opens_no_gpu(doctor: Doctor) -> None:
    """CUDA does not survive a fork."""
    code = (
        "import os, sys\n"
        "from ddpdoctor.preflight.selftest import ranks\n"
        "ranks.prepare(sys.argv[1])\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    torch.zeros(1, device='cuda').item()\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitpid(pid, 0)[1])\n"
    )
    for backend in ("nccl", "gloo"):
        env = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        words = (sys.executable, "-c", code, backend)
        result = doctor.run(*words, env=env, watch=False, timeout=SECONDS)
        assert result.status == 0, result.stderr


HOLDS = """
    import sys
    import torch
    free, _ = torch.cuda.mem_get_info(0)
    held = torch.empty(free - (2 << 30), dtype=torch.uint8, device="cuda:0")
    print("held", flush=True)
    sys.stdin.read()
"""
"""A job that has all of GPU 0 but 2 GiB."""


def test_a_gpu_that_somebody_needs_is_left_alone(doctor: Doctor) -> None:
    idle()
    script = doctor.write("holds.py", HOLDS)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=doctor.environment(),
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stdin is not None
            assert holder.stdout.readline() == b"held\n"
            before = used()
            words = ("--json", "--only", "collectives,gpu-memory", "--nproc-per-node", "1")
            result = check(doctor, *words)
            told = outcomes(result.stdout)
            assert "NCCL skipped: GPU " in told["collectives"]["detail"]
            assert told["collectives"]["status"] == "pass"
            assert told["gpu-memory"]["status"] == "warn"
            assert used()[0] <= before[0] + SLACK
            holder.stdin.close()
            assert holder.wait(LIMIT) == 0
        finally:
            holder.kill()


def test_an_interrupt_while_nccl_runs_leaves_nothing_behind(doctor: Doctor, token: str) -> None:
    idle()
    before = used()
    words = ("check", "--timeout", "300", "--only", "collectives")
    live = doctor.start(sys.executable, "-m", "ddpdoctor", *words, watch=False)
    deadline = time.monotonic() + SECONDS
    while live.process.poll() is None and time.monotonic() < deadline:
        if any(now > was + 150 for now, was in zip(used(), before, strict=True)):
            break
        time.sleep(0.02)
    assert live.process.poll() is None, "it ended before a GPU was seen in use"
    live.process.send_signal(signal.SIGINT)
    assert live.process.wait(LIMIT) == 130
    deadline = time.monotonic() + LIMIT
    while marked(token) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(token) == []
    after = wait_until_used(before)
    assert all(now <= was + SLACK for now, was in zip(after, before, strict=True))


# Faults, which NCCL shows between two GPUs at least.


def nccl_finding(result: Result) -> dict[str, Any]:
    told = outcomes(result.stdout)["collectives"]
    assert result.status == 2 and told["status"] == "fail", told
    found: list[dict[str, Any]] = [each for each in told["findings"] if "NCCL" in each["message"]]
    assert len(found) == 1, told
    return found[0]


@needs_two
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (WRONG, "rank 1, all_reduce: element 7 is"),
        (DIES, "rank 1: the rank was ended by SIGKILL"),
        pytest.param(SILENT, "rank 0", marks=pytest.mark.slow),
    ],
)
def test_a_fault_between_gpus_is_named(doctor: Doctor, source: str, said: str) -> None:
    # gloo, which has the same fault, comes first.
    words = ("--json", "--only", "collectives", "--nproc-per-node", "2")
    found = nccl_finding(check(doctor, *words, env=fault(doctor, source)))
    assert said in " ".join([found["message"], *found["evidence"]]), found
    assert "frame #" not in " ".join(found["evidence"])


# The ranks of the test across nodes.


def reduced(orders: list[dict[str, Any]], token: str) -> list[dict[str, Any]]:
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, TOKEN: token, "TORCH_NCCL_BLOCKING_WAIT": "1"},
        )
        for _ in orders
    ]
    answers = []
    try:
        for process, order in zip(running, orders, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        for process in running:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"ready": True}
            answer: dict[str, Any] = {}
            while not {"done", "ended"} & answer.keys():
                answer |= json.loads(process.stdout.readline())
            answers.append(answer)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return answers


def orders(node_of: list[int]) -> list[dict[str, Any]]:
    port = free_port()
    return [
        {
            "backend": "gloo", "tests": ["all_reduce"], "measure": True, "soak": 0.0,
            "host": "127.0.0.1", "port": port, "first": rank, "ranks": 1, "local_rank": rank,
            "world": len(node_of), "limit": 60, "stage_limit": 60, "patience": 200,
            "stages": "nccl", "node_of": node_of,
        }
        for rank in range(len(node_of))
    ]  # fmt: skip


def test_the_stages_of_a_single_node_run_on_nccl(token: str) -> None:
    """As the check runs them between nodes: all the GPUs of one node, one rank each."""
    for answer in reduced(orders([0] * GPUS), token):
        assert answer["ok"], answer
        stages = answer["stages"]["stages"]
        assert answer["stages"]["ok"], answer
        assert [stage["name"] for stage in stages] == ["inside the node", "of all nodes"]
        # A single rank moves nothing.
        assert all((stage["bus"] > 1e8) == (GPUS > 1) for stage in stages)


@needs_two
def test_the_stages_go_from_nodes_over_pairs_to_all(token: str) -> None:
    """Each GPU as a node of its own: several communicators of one process, one after the other."""
    for answer in reduced(orders(list(range(GPUS))), token):
        assert answer["ok"] and answer["stages"]["ok"], answer
        assert answer["stages"]["stages"][-1]["bus"] > 1e8


@needs_two
def test_a_rank_that_cannot_open_its_gpu_fails_in_nccl_alone(token: str) -> None:
    asked = orders([0, 1])
    asked[1]["local_rank"] = 99
    for each in asked:
        each["stage_limit"] = 15
    answers = reduced(asked, token)
    assert all(answer["ok"] for answer in answers), answers
    assert not any(answer["stages"]["ok"] for answer in answers)
    assert "invalid device ordinal" in answers[1]["stages"]["stages"][0]["error"]


@needs_two
def test_two_nodes_with_a_gpu_each_reduce_with_nccl(doctor: Doctor) -> None:
    """Two checks on this machine, each with a GPU of its own."""
    before = used()
    port = free_port()
    running = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "ddpdoctor", "check", "--json", "--nnodes", "2"),
                *("--node-rank", str(rank), "--nproc-per-node", "1", "--timeout", "200"),
                *("--rdzv-endpoint", f"127.0.0.1:{port}"),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**doctor.environment(), "CUDA_VISIBLE_DEVICES": str(rank)},
        )
        for rank in (0, 1)
    ]
    try:
        for process in running:
            told = outcomes(process.communicate(timeout=230)[0])
            nccl = told["nccl-nodes"]
            assert nccl["status"] in ("pass", "warn"), nccl
            started = "2 of 2 ranks reduced correctly; between nodes 1 apart "
            assert nccl["detail"].startswith(started)
            assert "GB/s" in nccl["detail"]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    after = wait_until_used(before)
    assert all(now <= was + SLACK for now, was in zip(after, before, strict=True))
