"""``ddpdoctor check`` across nodes, in a lab: the name that torchrun's c10d gives to all ranks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import pytest

from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Make, agreeing, silent

BY_ADDRESS = ("--rdzv-endpoint", f"10.77.0.1:{PORT}", "--rdzv-backend", "c10d")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), WITHOUT_TORCH], ids=["reduces", "without torch"])
def test_a_name_that_a_peer_cannot_resolve(nodes: Make, more: Sequence[str]) -> None:
    """pytorch#85300: torchrun meets by the endpoint's address, and then its ranks wait."""
    checks = nodes(2)
    first, second = checks.lab.hosts
    faults.name_unknown(second, first)
    said = checks.run(*BY_ADDRESS, *more)
    assert agreeing(said, "DDP055") == (
        "node1 (node 1) cannot find node0 (node 0) by the name that torchrun gives to all ranks, "
        "node0"
    )
    for each in said:
        assert each.status == 2
    if more:
        return
    (finding,) = said[1].findings("gloo-addresses")
    line = shlex.split(finding["paste"])
    assert line[:2] == ["ddpdoctor", "check"] and line[-2:] == ["--local-addr", "10.77.0.1"]
    silent(checks.run(*BY_ADDRESS, each={0: line[-2:]}))


@pytest.mark.slow
def test_a_name_that_leads_elsewhere(nodes: Make) -> None:
    checks = nodes(3)
    first, _, third = checks.lab.hosts
    faults.name_wrong(third, first, "127.0.1.1")
    said = checks.run(*BY_ADDRESS, *WITHOUT_TORCH)
    assert agreeing(said, "DDP055").startswith("node2 (node 2) cannot find node0 (node 0) by the")
    assert said[0].findings("gloo-addresses")[0]["evidence"] == ["node2: it is 127.0.1.1 there"]


@pytest.mark.slow
def test_static_ranks_take_the_endpoint(nodes: Make) -> None:
    checks = nodes(2)
    first, second = checks.lab.hosts
    faults.name_unknown(second, first)
    silent(checks.run("--rdzv-endpoint", f"10.77.0.1:{PORT}"))
