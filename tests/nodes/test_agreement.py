"""``ddpdoctor check`` across nodes, in a lab: nodes that were told different things."""

from __future__ import annotations

import time

import pytest

from tests.conftest import LIMIT
from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Make, agreeing, silent


def test_two_nodes_with_one_rank(nodes: Make) -> None:
    said = nodes(3).run(*WITHOUT_TORCH, each={2: ("--node-rank", "1")})
    assert agreeing(said, "DDP051") == "2 nodes have --node-rank 1: node1, node2"


def test_two_nodes_with_rank_0(nodes: Make) -> None:
    said = nodes(2).run(*WITHOUT_TORCH, each={1: ("--node-rank", "0")})
    assert agreeing(said, "DDP051") == "2 nodes have --node-rank 0: node0, node1"


@pytest.mark.slow
def test_different_nnodes(nodes: Make) -> None:
    said = nodes(2).run(*WITHOUT_TORCH, each={1: ("--nnodes", "3")})
    assert agreeing(said, "DDP051") == "the nodes do not agree on --nnodes: 2, 3"


@pytest.mark.slow
@pytest.mark.parametrize("told", [2, 4])
def test_another_nnodes_on_node_0_does_not_keep_the_others_waiting(nodes: Make, told: int) -> None:
    """They are three: no fourth is waited for, and the third is not left at a closed door."""
    said = nodes(3).run(*WITHOUT_TORCH, each={0: ("--nnodes", str(told))})
    here = [each for each in said if each.findings("same-job")]
    numbers = ", ".join(map(str, sorted([told, 3])))
    assert agreeing(here, "DDP051") == f"the nodes do not agree on --nnodes: {numbers}"
    assert len(here) == min(told, 3)
    for each in said:
        if each not in here:
            assert "had all its nodes already" in each.messages
    if told == 4:
        # That no fourth came is a consequence of that.
        assert said[0].findings("nodes") == []
        assert "3 of 4 nodes" in said[0].outcome("nodes")["detail"]


@pytest.mark.slow
def test_different_numbers_of_ranks(nodes: Make) -> None:
    """It works, so it is a warning, and the ranks of all nodes reduce together."""
    said = nodes(3).run(each={2: ("--nproc-per-node", "2")})
    assert agreeing(said, "DDP051") == "the nodes have different numbers of ranks: 1, 2"
    for each in said:
        (finding,) = each.findings("same-job")
        assert finding["severity"] == "warning"
        assert [line.replace(", this one", "") for line in finding["evidence"]] == [
            "--nproc-per-node 1: node0 (node 0), node1 (node 1)",
            "--nproc-per-node 2: node2 (node 2)",
        ]
        assert finding["paste"] == (
            "ddpdoctor check --nnodes 3 --node-rank 2 --nproc-per-node 1 --rdzv-endpoint "
            f"node0:{PORT}"
        )
        assert "4 of 4 ranks reduced correctly" in each.outcome("gloo-nodes")["detail"]
        assert each.status == 1


@pytest.mark.slow
def test_a_node_too_many(nodes: Make) -> None:
    checks = nodes(3)
    # Two are busy for some seconds, so that the third finds them.
    for host in checks.lab.hosts:
        faults.firewall(checks.lab, host, ports=faults.EPHEMERAL)
    said = checks.run("--nnodes", "2", *WITHOUT_TORCH, each={2: ("--node-rank", "1")})
    last = [each for each in said if "all its nodes already" in each.messages]
    assert len(last) == 1


@pytest.mark.slow
def test_another_rendezvous_id(nodes: Make) -> None:
    said = nodes(2).run("--timeout", "8", *WITHOUT_TORCH, each={1: ("--rdzv-id", "other")})
    (absent,) = said[0].findings("nodes")
    assert absent["message"].startswith("node rank 1 did not come within 4 s; node1 came with ")
    assert "another rendezvous id, or none" in absent["evidence"][1]
    assert absent["evidence"][1].endswith(": node1 10.77.0.2")
    (other,) = said[1].findings("nodes")
    assert "is of another job: it has another rendezvous id" in other["message"]
    assert other["paste"].endswith("--rdzv-endpoint node0:29501 --rdzv-id other")


def test_an_id_that_was_corrected_in_time_is_no_fault(nodes: Make) -> None:
    checks = nodes(2)
    first, second = checks.lab.hosts
    patient = (*WITHOUT_TORCH, "--timeout", str(LIMIT))
    process, out, err = checks.start(first, checks.words(first, "--json", *patient))
    while checks.run(*WITHOUT_TORCH, "--rdzv-id", "typo", "--timeout", "2", hosts=[second])[
        0
    ].messages.startswith("node0:29500 (10.77.0.1) refuses"):
        assert process.poll() is None, err.read_text()
    silent(checks.run(*patient, hosts=[second]))
    assert process.wait(LIMIT) == 0, out.read_text()


@pytest.mark.slow
def test_the_same_wrong_id_twice_is_one_node(nodes: Make) -> None:
    checks = nodes(3)
    first, second, third = checks.lab.hosts
    process, out, _ = checks.start(first, checks.words(first, *WITHOUT_TORCH))
    for _ in range(2):
        (said,) = checks.run(*WITHOUT_TORCH, "--rdzv-id", "typo", hosts=[second])
        assert "another rendezvous id" in said.messages
    time.sleep(4)
    silent(checks.run(*WITHOUT_TORCH, hosts=[second, third]))
    assert process.wait(LIMIT) == 0, out.read_text()
