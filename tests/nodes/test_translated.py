"""``ddpdoctor check`` across nodes, in a lab: nodes whose addresses are translated on the way."""

from __future__ import annotations

import pytest

from tests.lab import faults
from tests.lab.checking import PORT, Make, agreeing

OUTSIDE = ("203.0.113.1", "203.0.113.2")
ENDPOINT = ("--rdzv-endpoint", f"{OUTSIDE[0]}:{PORT}")


@pytest.mark.parametrize(
    "inside",
    [
        pytest.param(("10.1.0.2", "10.2.0.2"), id="lower"),
        pytest.param(("10.2.0.2", "10.1.0.2"), id="higher", marks=pytest.mark.slow),
        pytest.param(("172.17.0.2",) * 2, id="equal", marks=pytest.mark.slow),
    ],
)
def test_both_nodes_behind_nat_with_the_port_forwarded(
    nodes: Make, inside: tuple[str, str]
) -> None:
    checks = nodes(2)
    ports = (str(PORT), "none")
    faults.behind_translation(checks, *zip(inside, OUTSIDE, ports, strict=True))
    said = checks.run(*ENDPOINT)
    assert agreeing(said, "DDP053") == (
        "node0 (node 0) and node1 (node 1) cannot open connections to each other: an address is "
        "translated on the way (NAT, a tunnel, a container's network)"
    )
    for each in said:
        (finding,) = each.findings()
        assert finding["evidence"][:2] == [
            f"node{rank} has {own}, and is seen at {OUTSIDE[rank]}"
            for rank, own in enumerate(inside)
        ] or finding["evidence"][:2] == [
            f"node{rank} has {inside[rank]}, and is seen at {OUTSIDE[rank]}" for rank in (1, 0)
        ]
        assert each.outcome("gloo-nodes")["status"] == "skipped"
        assert each.status == 2


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["10.2.0.2", "240.0.0.2"])
def test_one_node_behind_nat(nodes: Make, inside: str) -> None:
    """It dials the other one, which has the lower address in the second case alone."""
    checks = nodes(2)
    first = (OUTSIDE[0], OUTSIDE[0], "all")
    faults.behind_translation(checks, first, (inside, OUTSIDE[1], "none"))
    said = checks.run(*ENDPOINT)
    works = inside > OUTSIDE[0]
    told = agreeing(said, "DDP053")
    assert told.startswith("node0 (node 0) cannot open a connection to node1 (node 1): an address")
    for each in said:
        assert each.status == (1 if works else 2)
        assert each.outcome("gloo-nodes")["status"] == ("pass" if works else "skipped")
