"""``ddpdoctor check`` across nodes, in a lab: what node 0 hears of a node that does not come."""

from __future__ import annotations

import pytest

from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Make, agreeing

PATIENT = (*WITHOUT_TORCH, "--timeout", "40")


@pytest.mark.slow
def test_a_firewall_on_the_other_side_is_not_node_0_s(nodes: Make) -> None:
    """What node 0 sends back is dropped: it sees half a connection, and is told so by UDP."""
    checks = nodes(2)
    first, second = checks.lab.hosts
    faults.firewall(checks.lab, second, connections_only=False)
    said = checks.run(*PATIENT)
    (here,), (there,) = (each.findings("nodes") for each in said)
    assert here["message"] == (
        f"node1 (node 1, {second.address}) calls port {PORT} of node 0, and gets no answer: a "
        "firewall on its side, or on the way to it, drops what node 0 sends"
    )
    assert here["nodes"] == ["node1"]
    assert there["message"] == (
        f"node0:{PORT} ({first.address}) hears this machine, but what it sends back does not "
        "arrive here"
    )
    line = f"sudo iptables -I INPUT -p tcp -s {first.address} -j ACCEPT"
    assert here["paste"] == there["paste"] == line


@pytest.mark.slow
def test_node_0_hears_of_a_port_that_only_datagrams_get_through(nodes: Make) -> None:
    checks = nodes(2)
    first, second = checks.lab.hosts
    for ports in (PORT, faults.EPHEMERAL):
        faults.firewall(checks.lab, first, source=second, ports=ports)
    said = checks.run(*PATIENT)
    (here,), (there,) = (each.findings("nodes") for each in said)
    assert here["message"] == (
        f"node1 (node 1, {second.address}) cannot connect to port {PORT} of node 0: the packets "
        "are silently dropped"
    )
    assert there["evidence"] == [f"the check runs there: it answers at port {PORT} by UDP"]


@pytest.mark.slow
def test_two_nodes_with_one_address_are_one_error_on_each_node(nodes: Make) -> None:
    """Now one of them comes, now the other, and sometimes a connection breaks in the middle."""
    checks = nodes(3)
    _, second, third = checks.lab.hosts
    faults.address_of(third, second)
    said = checks.run(*PATIENT)
    for each in said:
        worse = [one for one in each.findings() if one["severity"] != "info"]
        assert worse and all("address" in one["message"] for one in worse), each.messages
        assert each.status & 2
        assert "firewall" not in str(worse)
    # On node 0 it is no information beside another error.
    assert not said[0].findings("verdicts")


@pytest.mark.slow
def test_a_node_with_the_address_of_node_0(nodes: Make) -> None:
    checks = nodes(2)
    first, second = checks.lab.hosts
    faults.address_of(second, first)
    said = checks.run(*PATIENT)
    for each in said:
        (finding,) = (one for one in each.findings() if one["severity"] != "info")
        assert finding["code"] == "DDP018"
        assert "has this machine's address, 10.77.0.1" in finding["message"]


@pytest.mark.slow
@pytest.mark.parametrize("pulled", [True, False], ids=["no carrier", "down"])
def test_node_0_whose_own_link_is_down_hears_that_alone(nodes: Make, pulled: bool) -> None:
    checks = nodes(2)
    first = checks.lab.hosts[0]
    if pulled:
        faults.cable_pulled(checks.lab, first)
    else:
        first.run("ip", "link", "set", "eth0", "down")
    (said,) = checks.run(*WITHOUT_TORCH, "--timeout", "10", hosts=[first])
    (finding,) = said.findings()
    assert finding["message"].startswith("gloo will use eth0, which is down")
    assert finding["paste"] == (
        "ip link show dev eth0" if pulled else "sudo ip link set dev eth0 up"
    )


@pytest.mark.slow
def test_a_link_that_is_down_beside_one_that_leads_elsewhere(nodes: Make) -> None:
    checks = nodes(2)
    faults.second_network(checks.lab, 0)
    host = checks.lab.hosts[1]
    host.run("ip", "route", "add", "default", "via", "10.88.0.1")
    faults.cable_pulled(checks.lab, host)
    (said,) = checks.run(*WITHOUT_TORCH, "--timeout", "30", hosts=[host])
    (finding,) = said.findings()
    assert finding["message"].startswith("gloo will use eth0, which is down")
    assert finding["paste"] == "ip link show dev eth0"
    assert "the interface eth0 of this machine has no carrier" in str(finding["evidence"])


@pytest.mark.slow
def test_another_id_and_an_open_port_are_heard_too(nodes: Make) -> None:
    checks = nodes(3)
    ids = {0: "one", 1: "two", 2: "one"}
    said = checks.run(*PATIENT, each={rank: ("--rdzv-id", name) for rank, name in ids.items()})
    assert "node1 came with another rendezvous id" in agreeing([said[0], said[2]], "DDP050")
