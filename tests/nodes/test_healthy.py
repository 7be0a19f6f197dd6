"""``ddpdoctor check`` across nodes, in a lab: healthy."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import LIMIT, Doctor
from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Make, silent


def test_two_healthy_nodes_reduce_and_are_given_the_line_that_starts_the_job(nodes: Make) -> None:
    checks = nodes(2)
    said = checks.run()
    silent(said)
    for each in said:
        assert each.outcome("nodes")["detail"] == "2 of 2 nodes are here"
        told = each.outcome("gloo-nodes")["detail"]
        # On a busy machine one time is enough, and is said.
        assert re.match(
            r"2 of 2 nodes, 2 of 2 ranks reduced correctly(, 1 time)?; bus bandwidth ", told
        )
        assert each.outcome("nccl-nodes")["detail"] == "no GPU"
    # The rendezvous port is free again at once.
    host = checks.lab.hosts[0]
    host.run(sys.executable, "-c", f"import socket; socket.create_server(('', {PORT}))")


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_more_healthy_nodes(nodes: Make, size: int) -> None:
    said = nodes(size).run()
    silent(said)
    for each in said:
        assert each.outcome("links")["detail"] == (
            f"{size * (size - 1)} of {size * (size - 1)} directions between nodes are open"
        )
        assert f"{size} of {size} ranks" in each.outcome("gloo-nodes")["detail"]


def test_a_container_bridge_that_nothing_uses_is_no_fault(nodes: Make) -> None:
    checks = nodes(2)
    for host in checks.lab.hosts:
        faults.container_bridge(host)
    silent(checks.run(*WITHOUT_TORCH))


@pytest.mark.slow
def test_a_fraction_of_a_second_between_clocks_is_no_fault(nodes: Make, tmp_path: Path) -> None:
    checks = nodes(2)
    faults.clock_shifted(checks.lab.hosts[1], 0.6, tmp_path)
    silent(checks.run(*WITHOUT_TORCH))


@pytest.mark.slow
def test_nodes_without_node_ranks_find_each_other(nodes: Make) -> None:
    checks = nodes(3)
    running = []
    for host in checks.lab.hosts:
        words = checks.words(host, "--json", *WITHOUT_TORCH)
        at = words.index("--node-rank")
        running.append(checks.start(host, [*words[:at], *words[at + 2 :]]))
    for process, out, err in running:
        assert process.wait(LIMIT) == 0, out.read_text() + err.read_text()
        assert "3 of 3 nodes are here" in out.read_text()


def test_slurm_says_it_all(nodes: Make) -> None:
    checks = nodes(2)
    running = []
    for host in checks.lab.hosts:
        slurm = {
            "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(host.rank),
            "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": str(host.rank),
            "SLURM_NNODES": "2", "SLURM_STEP_NODELIST": "node[0-1]",
        }  # fmt: skip
        words = [sys.executable, "-m", "ddpdoctor", "check", "--nproc-per-node", "1"]
        running.append(checks.start(host, words, slurm))
    for rank, (process, out, err) in enumerate(running):
        assert process.wait(LIMIT) == 0, out.read_text() + err.read_text()
        assert out.read_text().splitlines()[-1] == (
            f"ddpdoctor run --nnodes 2 --node-rank {rank} --nproc-per-node 1 "
            "--rdzv-endpoint node0:29500 --rdzv-id 77 -- train.py"
        )


def test_of_several_tasks_on_a_node_one_checks(doctor: Doctor) -> None:
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    done = doctor.cli("check", env=slurm)
    assert (done.status, done.stdout) == (0, "left to the first task of this node\n")


@pytest.mark.slow
def test_without_an_endpoint_a_node_asks_for_one(nodes: Make) -> None:
    checks = nodes(1)
    words = [sys.executable, "-m", "ddpdoctor", "check", "--nnodes", "2", "--node-rank", "1"]
    process, out, err = checks.start(checks.lab.hosts[0], [*words, *WITHOUT_TORCH])
    assert process.wait(LIMIT) == 2, err.read_text()
    assert "no rendezvous endpoint is given" in out.read_text()
