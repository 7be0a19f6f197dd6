"""``ddpdoctor check`` across nodes, in a lab: connections between nodes."""

from __future__ import annotations

import re

import pytest

from tests.lab import faults
from tests.lab.checking import WITHOUT_TORCH, Make, agreeing
from tests.lab.network import INTERFACE


def test_a_one_way_firewall_is_named_with_its_direction(nodes: Make) -> None:
    """Between three nodes: one way is dropped, another one rejected."""
    checks = nodes(4)
    first, second, third, _ = checks.lab.hosts
    faults.firewall(checks.lab, second, source=first, ports=faults.EPHEMERAL)
    faults.firewall(checks.lab, first, source=third, ports=faults.EPHEMERAL, reject=True)
    said = checks.run(*WITHOUT_TORCH)
    assert agreeing(said, "DDP053").splitlines() == [
        "node2 (node 2) cannot open a connection to node0 (node 0): it is rejected on the way",
        "node0 (node 0) cannot open a connection to node1 (node 1): the packets are "
        "silently dropped",
    ]
    # Of the two ways gloo uses the first alone.
    found = said[0].findings("links")
    assert [each["severity"] for each in found] == ["error", "warning"]
    assert found[1]["evidence"][1] == "the opposite direction, from node1, is open"
    assert [each.codes for each in said] == [["DDP053"]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("reject", [False, True], ids=["dropped", "rejected"])
@pytest.mark.parametrize("closed", [0, 1])
def test_a_blocked_port_between_two_nodes(nodes: Make, closed: int, reject: bool) -> None:
    checks = nodes(2)
    faults.firewall(checks.lab, checks.lab.hosts[closed], ports=faults.EPHEMERAL, reject=reject)
    said = checks.run()
    other = 1 - closed
    # gloo dials from the higher address to the lower one.
    used = closed == 0
    assert {each.findings("links")[0]["severity"] for each in said} == {
        "error" if used else "warning"
    }
    assert agreeing(said, "DDP053").startswith(
        f"node{other} (node {other}) cannot open a connection to node{closed} (node {closed}): "
        + ("it is rejected" if reject else "the packets are silently dropped")
    )
    told = "skipped" if used else "pass"
    assert all(each.outcome("gloo-nodes")["status"] == told for each in said)
    assert all(each.status == (2 if used else 1) for each in said)


@pytest.mark.slow
def test_a_node_that_no_node_reaches_is_blamed_as_a_node(nodes: Make) -> None:
    checks = nodes(4)
    faults.firewall(checks.lab, checks.lab.hosts[2], ports=faults.EPHEMERAL)
    said = checks.run(*WITHOUT_TORCH)
    assert agreeing(said, "DDP053") == (
        "no other node can open a connection to node2 (node 2): the packets are silently dropped"
    )
    assert "-s 10.77.0.1,10.77.0.2,10.77.0.4" in said[0].findings("links")[0]["paste"]


@pytest.mark.slow
def test_a_node_that_reaches_no_node_is_blamed_as_a_node(nodes: Make) -> None:
    checks = nodes(4)
    blocked = checks.lab.hosts[1]
    for host in checks.lab.hosts:
        if host is not blocked:
            faults.firewall(checks.lab, host, source=blocked, ports=faults.EPHEMERAL)
    said = checks.run(*WITHOUT_TORCH)
    assert agreeing(said, "DDP053") == (
        "node1 (node 1) can open a connection to no other node: the packets are silently dropped"
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_large_packets_that_vanish(nodes: Make, size: int) -> None:
    checks = nodes(size)
    faults.packet_size_limit(checks.lab, checks.lab.hosts[1], largest=1400)
    said = checks.run(*WITHOUT_TORCH)
    where = "between node0 (node 0) and node1 (node 1)" if size == 2 else "to and from node1"
    assert f"packets of 1500 bytes are lost {where}" in agreeing(said, "DDP054")
    assert said[0].findings("packet-size")[0]["paste"] == "sudo ip link set dev eth0 mtu 1400"
    assert [each.codes for each in said] == [["DDP054"]] * size


def test_different_mtu(nodes: Make) -> None:
    checks = nodes(3)
    checks.lab.hosts[2].run("ip", "link", "set", "dev", INTERFACE, "mtu", "1400")
    said = checks.run(*WITHOUT_TORCH)
    assert agreeing(said, "DDP054") == (
        "the largest packet (MTU) is 1400 bytes on node2 (node 2) and 1500 bytes on others"
    )
    assert all(each.status == 1 for each in said)


@pytest.mark.slow
def test_a_slow_cable(nodes: Make) -> None:
    checks = nodes(4)
    faults.slow_cable(checks.lab, checks.lab.hosts[1], megabits=20)
    said = checks.run(*WITHOUT_TORCH)
    assert agreeing(said, "DDP056").startswith("every link to node1 (node 1) is slow: ")


@pytest.mark.slow
def test_a_slow_network_that_gloo_was_given(nodes: Make) -> None:
    """What the nodes reach each other by is fast: the links are measured as gloo will dial."""
    checks = nodes(2)
    named = {"GLOO_SOCKET_IFNAME": faults.second_network(checks.lab, megabits=20)}
    said = checks.run(env={0: named, 1: named})
    for each in said:
        assert "2 of 2 ranks reduced correctly" in each.outcome("gloo-nodes")["detail"]
        outcome = each.outcome("link-speed")
        if "for lack of CPU" in outcome["detail"]:
            # Other work on this machine: nothing is said of the network.
            assert outcome["findings"] == []
            continue
        (finding,) = outcome["findings"]
        assert re.search(r"is slow: (?:1[5-9]|[234]\d) Mbit/s", finding["message"])
        assert finding["severity"] == "warning"
        assert (
            "it is the way that gloo takes: node0 10.88.0.1 (GLOO_SOCKET_IFNAME=eth1)"
            in finding["evidence"]
        )
        assert finding["paste"].startswith("grep . /sys/class/net/eth1/speed ")
