"""``ddpdoctor check`` across nodes, in a lab: after the line to paste, the check is green."""

from __future__ import annotations

import pytest

from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Make, agreeing, silent

BY_ADDRESS = ("--rdzv-endpoint", f"192.168.77.1:{PORT}")
ABOVE_LOOPBACK = "192.168.77"


@pytest.mark.parametrize("stale", ["192.168.77.40", "127.0.1.1"])
def test_an_old_line_of_the_own_name(nodes: Make, stale: str) -> None:
    """The line is added before the old one, which would win."""
    checks = nodes(2, ABOVE_LOOPBACK)
    second = checks.lab.hosts[1]
    faults.name_wrong(second, second, stale)
    said = checks.run(*BY_ADDRESS)
    assert all(each.status & 2 for each in said)
    pasted = (said[1].findings("host-name") or said[1].findings())[0]
    if "printf" in pasted["paste"]:
        checks.paste(second, pasted)
        silent(checks.run(*BY_ADDRESS))
        return
    # The variable that gloo goes by, in the environment of the job.
    name, _, value = pasted["paste"].split()[1].partition("=")
    said = checks.run(*BY_ADDRESS, env={1: {name: value}})
    assert {each.status for each in said} == {0}


@pytest.mark.slow
def test_packets_that_are_too_large(nodes: Make) -> None:
    checks = nodes(2)
    faults.packet_size_limit(checks.lab, checks.lab.hosts[1], largest=1400)
    (finding,) = checks.run()[0].findings("packet-size")
    for host in checks.lab.hosts:
        checks.paste(host, finding)
    silent(checks.run())


@pytest.mark.slow
def test_an_endpoint_that_is_another_node(nodes: Make) -> None:
    checks = nodes(2)
    there = ("--rdzv-endpoint", f"node1:{PORT}", "--timeout", "30")
    (finding,) = checks.run(*there)[0].findings("nodes")
    words = finding["paste"].split()
    silent(checks.run("--rdzv-endpoint", words[words.index("--rdzv-endpoint") + 1]))


def test_a_chosen_interface_that_is_down_at_the_other_end(nodes: Make) -> None:
    """Node 0 is well: what it listens on is not reached, because node 1's end is down."""
    checks = nodes(2)
    name = faults.second_network(checks.lab, 1000)
    chosen = {"GLOO_SOCKET_IFNAME": name}
    checks.lab.hosts[1].run("ip", "link", "set", name, "down")
    said = checks.run(*WITHOUT_TORCH, env={0: chosen, 1: chosen})
    assert agreeing(said, "DDP055") == (
        "eth1 is down on node1 (node 1): it does not reach node0 (node 0) there"
    )
    assert [each.document["exclude"] for each in said] == [["node1"]] * 2
    checks.paste(checks.lab.hosts[1], said[0].findings("gloo-addresses")[0])
    silent(checks.run(*WITHOUT_TORCH, env={0: chosen, 1: chosen}))


@pytest.mark.slow
def test_a_second_interface_that_leads_nowhere(nodes: Make) -> None:
    """gloo takes both, and would hang with the second connection."""
    checks = nodes(2)
    name = faults.second_network(checks.lab, 1000)
    faults.apart(checks.lab, checks.lab.hosts[1])
    chosen = {"GLOO_SOCKET_IFNAME": f"eth0,{name}"}
    said = checks.run(*WITHOUT_TORCH, env={0: chosen, 1: chosen})
    assert agreeing(said, "DDP055").startswith("gloo takes 10.88.0.1 (eth1) on node0 (node 0) and")
    line = said[0].findings("gloo-addresses")[0]["paste"]
    assert line == "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
    named = {"GLOO_SOCKET_IFNAME": "eth0"}
    silent(checks.run(*WITHOUT_TORCH, env={0: named, 1: named}))
