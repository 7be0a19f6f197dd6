"""``ddpdoctor check`` with NCCL, on real GPUs. Each test says why it was skipped where it was."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from ddpdoctor.gpu.visible import visible
from ddpdoctor.preflight.meeting.ranks import PROGRAM
from tests.conftest import TOKEN, Doctor

GPUS = visible(os.environ)

pytestmark = pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU is visible on this machine")

two_gpus = pytest.mark.skipif(
    GPUS < 2, reason=f"{GPUS} GPU is visible: NCCL between nodes needs one for each"
)


def outcomes(text: str) -> dict[str, Any]:
    return {each["check"]: each for each in json.loads(text)["checks"]}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_one_machine_reduces_with_nccl(doctor: Doctor) -> None:
    done = doctor.cli("check", "--json", "--nproc-per-node", str(GPUS), "--timeout", "120")
    told = outcomes(done.stdout)
    assert told["collectives"]["status"] == "pass", told["collectives"]
    assert told["collectives"]["detail"].endswith(f"; {GPUS} of {GPUS} with NCCL")
    assert told["gpu-driver"]["status"] == "pass", told["gpu-driver"]
    assert told["gpu-count"]["status"] == "pass", told["gpu-count"]
    assert all(each["status"] != "could not run" for each in told.values()), told


def test_the_stages_of_a_single_node_run_on_nccl(token: str) -> None:
    """As the check runs them between nodes: all the GPUs of one node, one rank each."""
    port = free_port()
    orders = [
        {
            "host": "127.0.0.1", "port": port, "rank": rank, "local_rank": rank, "world": GPUS,
            "limit": 60, "stages": "nccl", "node_of": [0] * GPUS,
        }
        for rank in range(GPUS)
    ]  # fmt: skip
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, TOKEN: token},
        )
        for _ in orders
    ]
    try:
        for process, order in zip(running, orders, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        for process in running:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"ready": True}
            answer = json.loads(process.stdout.readline())
            assert answer["ok"], answer
            assert answer["stages"]["ok"], answer
            names = [stage["name"] for stage in answer["stages"]["stages"]]
            assert names == ["inside the node", "of all nodes"]
            # A single rank moves nothing.
            assert all((stage["bus"] > 1e8) == (GPUS > 1) for stage in answer["stages"]["stages"])
    finally:
        for process in running:
            process.kill()
            process.communicate()


@two_gpus
def test_two_nodes_with_a_gpu_each_reduce_with_nccl(doctor: Doctor) -> None:
    """Two checks on this machine, each with a GPU of its own."""
    port = free_port()
    running = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "ddpdoctor", "check", "--json", "--nnodes", "2"),
                *("--node-rank", str(rank), "--nproc-per-node", "1", "--timeout", "120"),
                *("--rdzv-endpoint", f"127.0.0.1:{port}"),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**doctor.environment(), "CUDA_VISIBLE_DEVICES": str(rank)},
        )
        for rank in (0, 1)
    ]
    for process in running:
        told = outcomes(process.communicate(timeout=130)[0])
        nccl = told["nccl-nodes"]
        assert nccl["status"] == "pass", nccl
        assert nccl["detail"].startswith("2 of 2 ranks reduced correctly; between nodes 1 apart ")
        assert "GB/s" in nccl["detail"]
