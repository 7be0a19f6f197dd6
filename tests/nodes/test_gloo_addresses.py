"""``ddpdoctor check`` across nodes, in a lab: the addresses that gloo and NCCL give to others."""

from __future__ import annotations

import pytest

from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Make, agreeing, silent
from tests.lab.network import INTERFACE

ABOVE_LOOPBACK = "192.168.77"
"""Addresses higher than 127.0.1.1, so that gloo there dials it; those of 10.0.0.0/8 are lower."""


@pytest.mark.slow
def test_an_own_name_on_loopback_that_no_node_dials_is_a_warning(nodes: Make) -> None:
    """The node with 127.0.1.1 dials those at 10.77.0.x: the job works."""
    checks = nodes(2)
    faults.own_name_is_loopback(checks.lab.hosts[1])
    said = checks.run()
    for each in said:
        assert [one["severity"] for one in each.findings("gloo-addresses")] == ["warning"]
        assert "2 of 2 ranks" in each.outcome("gloo-nodes")["detail"]
        assert each.status == 1


@pytest.mark.slow
def test_two_own_names_on_loopback(nodes: Make) -> None:
    checks = nodes(3)
    for host in checks.lab.hosts[1:]:
        faults.own_name_is_loopback(host)
    said = checks.run(*WITHOUT_TORCH)
    assert {one["severity"] for one in said[0].findings("gloo-addresses")} == {"error"}
    assert len(said[0].findings("gloo-addresses")) == 2


def test_an_own_name_on_loopback(nodes: Make) -> None:
    checks = nodes(2, ABOVE_LOOPBACK)
    faults.own_name_is_loopback(checks.lab.hosts[1])
    said = checks.run()
    assert agreeing(said, "DDP055") == (
        "gloo on node1 (node 1) listens on 127.0.1.1, where no other node reaches it"
    )
    for each in said:
        finding = each.findings("gloo-addresses")[0]
        assert finding["paste"] == "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
        assert each.outcome("gloo-nodes")["status"] == "skipped"


def test_an_interface_that_is_not_there_on_one_node(nodes: Make) -> None:
    checks = nodes(2)
    faults.rename_interface(checks.lab.hosts[1], "ens5")
    named = {"GLOO_SOCKET_IFNAME": INTERFACE}
    said = checks.run(*WITHOUT_TORCH, env={0: named, 1: named})
    assert agreeing(said, "DDP055") == (
        "gloo would not start on node1 (node 1): GLOO_SOCKET_IFNAME: 'eth0' does not exist"
    )
    paste = said[0].findings("gloo-addresses")[0]["paste"]
    assert paste == "export GLOO_SOCKET_IFNAME=ens5 NCCL_SOCKET_IFNAME=ens5"


@pytest.mark.slow
def test_an_interface_that_reaches_no_node_is_the_wrong_one(nodes: Make) -> None:
    """Chosen by name on one node: its loopback; on the other two: bridges of their own."""
    checks = nodes(3, ABOVE_LOOPBACK)
    for host in checks.lab.hosts:
        faults.container_bridge(host)
    bridge = {"GLOO_SOCKET_IFNAME": "docker0"}
    said = checks.run(env={0: bridge, 1: bridge, 2: {"GLOO_SOCKET_IFNAME": "lo"}})
    told = agreeing(said, "DDP055").splitlines()
    assert sorted(line.partition(",")[0] for line in told) == [
        "gloo on node0 (node 0) listens on 172.17.0.1 (docker0)",
        "gloo on node1 (node 1) listens on 172.17.0.1 (docker0)",
        "gloo on node2 (node 2) listens on 127.0.0.1",
    ]
    for each in said:
        assert each.status == 2
        assert {one["paste"] for one in each.findings("gloo-addresses")} == {
            "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
        }


def test_a_container_bridge_that_gloo_takes(nodes: Make) -> None:
    checks = nodes(2)
    for host in checks.lab.hosts:
        faults.container_bridge(host, named=True)
    said = checks.run("--rdzv-endpoint", f"10.77.0.1:{PORT}", *WITHOUT_TORCH)
    told = agreeing(said, "DDP055").splitlines()
    assert [line.partition(",")[0] for line in told] == [
        f"gloo on node{rank} (node {rank}) listens on 172.17.0.1 (docker0)" for rank in (0, 1)
    ]


@pytest.mark.slow
def test_nccls_interface_that_reaches_no_node(nodes: Make, one_gpu: dict[str, str]) -> None:
    checks = nodes(2)
    faults.second_network(checks.lab, 1000)
    faults.apart(checks.lab, checks.lab.hosts[1])
    chosen = {**one_gpu, "NCCL_SOCKET_IFNAME": "eth1"}
    said = checks.run(*WITHOUT_TORCH, env={0: chosen, 1: chosen})
    assert agreeing(said, "DDP055") == (
        "NCCL takes 10.88.0.1 (eth1) on node0 (node 0) and 10.88.0.2 (eth1) on node1 (node 1), "
        "which do not reach each other: no machine answers at that address"
    )
    (finding,) = said[0].findings("gloo-addresses")
    assert finding["paste"] == "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
    assert finding["evidence"][1] == "NCCL takes it there by NCCL_SOCKET_IFNAME=eth1"


@pytest.mark.slow
def test_the_network_that_nccl_uses_is_the_one_measured(
    nodes: Make, one_gpu: dict[str, str]
) -> None:
    checks = nodes(2)
    faults.second_network(checks.lab, 5)
    said = checks.run(*WITHOUT_TORCH, env={0: one_gpu, 1: one_gpu})
    assert agreeing(said, "DDP056") == ""
    slow = {**one_gpu, "NCCL_SOCKET_IFNAME": "eth1"}
    said = checks.run(*WITHOUT_TORCH, env={0: slow, 1: slow})
    assert "Mbit/s" in agreeing(said, "DDP056")
    assert agreeing(said, "DDP055") == ""


@pytest.mark.slow
def test_ipv6_on_one_node_alone(nodes: Make) -> None:
    checks = nodes(2)
    for host in checks.lab.hosts:
        host.run("ip", "address", "add", f"fd00:77::{host.rank + 1}/64", "dev", "eth0", "nodad")
        host.write_hosts(["127.0.0.1 localhost", "fd00:77::1 node0", "10.77.0.2 node1"])
    said = checks.run()
    assert agreeing(said, "DDP055") == (
        "gloo listens on IPv6 addresses on node0 (node 0) and on IPv4 addresses on the others: it "
        "connects only equals"
    )
    assert [each.codes for each in said] == [["DDP055"]] * 2
    (finding,) = said[0].findings("gloo-addresses")
    name, _, value = finding["paste"].removeprefix("export ").partition("=")
    silent(checks.run(env={0: {name: value}}))
