"""``ddpdoctor check`` across nodes, in a lab: one cause is one finding, and who prints it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import LIMIT
from tests.lab import faults
from tests.lab.checking import WITHOUT_TORCH, Checks, Make


def texts(checks: Checks, status: int) -> list[list[str]]:
    """The lines that the check prints on each host."""
    running = [
        checks.start(host, checks.words(host, *WITHOUT_TORCH, "--timeout", "240"))
        for host in checks.lab.hosts
    ]
    for process, out, err in running:
        assert process.wait(LIMIT) == status, out.read_text() + err.read_text()
    return [out.read_text().splitlines() for _, out, _ in running]


def test_the_first_node_shows_the_fault_and_the_other_that_it_has_nothing_to_do(
    nodes: Make,
) -> None:
    checks = nodes(2)
    faults.firewall(checks.lab, checks.lab.hosts[0], ports=faults.EPHEMERAL)
    here, there = texts(checks, 2)
    assert here[0].startswith("not ready: 2 nodes, seen from node0: 1 error (")
    assert here[2].startswith("error DDP053: node1 (node 1) cannot open a connection to node0 ")
    assert "links     fail    links: 1 of 2 directions between nodes are open" in here
    assert len(here) < 24
    (line,) = there
    assert line.startswith("not ready: node1 (node 1 of 2): 1 error, none to fix here; see node0 (")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_packets_that_are_lost_one_way_by_their_size_are_one_fault(nodes: Make, size: int) -> None:
    checks = nodes(size)
    faults.packet_size_hole(checks.lab, checks.lab.hosts[1])
    said = checks.run(*WITHOUT_TORCH, "--timeout", "240")
    assert [each.codes for each in said] == [["DDP054"]] * size
    for each in said:
        (finding,) = each.findings("packet-size")
        assert "node1 (node 1" in finding["message"] and finding["nodes"] == ["node1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "explained"),
    [
        (lambda checks: faults.cable_pulled(checks.lab, checks.lab.hosts[1]), "DDP004", "DDP050"),
        (lambda checks: faults.own_name_is_loopback(checks.lab.hosts[1]), "DDP055", "DDP003"),
    ],
)
def test_what_a_node_has_itself_explains_what_it_sees_of_others(
    nodes: Make, fault: Callable[[Checks], None], code: str, explained: str
) -> None:
    checks = nodes(2)
    fault(checks)
    said = checks.run(*WITHOUT_TORCH)[1]
    assert said.codes == [code]
    (finding,) = (each for each in said.findings() if each["code"] == code)
    assert any(each.startswith(f"also seen as {explained}: ") for each in finding["evidence"])
