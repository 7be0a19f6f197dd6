"""``ddpdoctor check`` across nodes, in a lab: which end of a second network is at fault.

Every node has a second interface that NCCL takes. The rendezvous and gloo use the first one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Checks, Make, agreeing
from tests.lab.network import Host

EXPORT = "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
UP = "sudo ip link set dev ib0 up"


def down(checks: Checks, host: Host, name: str) -> None:
    host.run("ip", "link", "set", name, "down")


def unplugged(checks: Checks, host: Host, name: str) -> None:
    checks.lab.at_switch("ip", "link", "set", f"slow{host.rank}", "down")


def dead(checks: Checks, host: Host, name: str) -> None:
    faults.apart(checks.lab, host)


def bare(checks: Checks, host: Host, name: str) -> None:
    host.run("ip", "address", "flush", "dev", name)


def moved(checks: Checks, host: Host, name: str) -> None:
    bare(checks, host, name)
    host.run("ip", "address", "add", "10.89.0.2/24", "dev", name)


def without(checks: Checks, host: Host, name: str) -> None:
    host.run("ip", "link", "delete", name)


THERE = "node0 (node 0), node2 (node 2)"
NO_HOST = "no machine answers at that address"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name", "message", "paste"),
    [
        (down, "ib0", f"ib0 is down on node1 (node 1): it does not reach {THERE} there", UP),
        (unplugged, "ib0", "ib0 has no carrier on node1 (node 1)", EXPORT),
        (dead, "ib0", f"ib0 of node1 (node 1) is up, but reaches no other node there: {NO_HOST}",
         EXPORT),
        (dead, "eth1", f"eth1 of node1 (node 1) is up, but reaches no other node there: {NO_HOST}",
         EXPORT),
        (bare, "ib0", "ib0 has no address on node1 (node 1)", EXPORT),
        (bare, "eth1", "eth1 has no address on node1 (node 1)", EXPORT),
        (moved, "ib0", "ib0 of node1 (node 1) is in another network, 10.89.0.0/24, than that of "
         f"{THERE}", EXPORT),
        (without, "ib0", "node1 (node 1) has no interface in the network that NCCL takes on "
         f"{THERE}", EXPORT),
    ],
)  # fmt: skip
def test_the_end_at_fault_is_named_and_its_line_repairs(
    nodes: Make,
    one_gpu: dict[str, str],
    fault: Callable[[Checks, Host, str], None],
    name: str,
    message: str,
    paste: str,
) -> None:
    checks = nodes(3)
    faults.second_network(checks.lab, 1000, name)
    fault(checks, checks.lab.hosts[1], name)
    said = checks.run(*WITHOUT_TORCH, env=dict.fromkeys(range(3), one_gpu))
    assert agreeing(said, "DDP055").startswith(message)
    assert [each.document["exclude"] for each in said] == [["node1"]] * 3
    (finding,) = said[0].findings("gloo-addresses")
    assert finding["paste"] == paste
    set_there = checks.paste_everywhere(said, "gloo-addresses")
    said = checks.run(*WITHOUT_TORCH, env={i: one_gpu | set_there.get(i, {}) for i in range(3)})
    assert all(each.findings("links", "gloo-addresses") == [] for each in said)
    # What else is said is of the stub: torch without CUDA.
    assert {each.status for each in said} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [dead, moved, without])
def test_of_two_nodes_no_healthy_end_is_blamed(
    nodes: Make, one_gpu: dict[str, str], fault: Callable[[Checks, Host, str], None]
) -> None:
    """Neither can be told from the other, so neither is to be excluded."""
    checks = nodes(2)
    faults.second_network(checks.lab, 1000, "ib0")
    fault(checks, checks.lab.hosts[1], "ib0")
    both = {0: one_gpu, 1: one_gpu}
    said = checks.run(*WITHOUT_TORCH, env=both)
    told = agreeing(said, "DDP055")
    assert "node0 (node 0)" in told and "node1 (node 1)" in told
    assert [each.document["exclude"] for each in said] == [[]] * 2
    set_there = checks.paste_everywhere(said, "gloo-addresses")
    said = checks.run(*WITHOUT_TORCH, env={i: one_gpu | set_there[i] for i in both})
    assert all(each.findings("links", "gloo-addresses") == [] for each in said)


def test_the_interface_that_each_library_takes_is_said(
    nodes: Make, one_gpu: dict[str, str]
) -> None:
    checks = nodes(2)
    faults.second_network(checks.lab, 1000, "ib0")
    said = checks.run(*WITHOUT_TORCH, env={0: one_gpu, 1: one_gpu | {"NCCL_SOCKET_IFNAME": "=ib0"}})
    for each in said:
        detail = each.outcome("gloo-addresses")["detail"]
        assert detail.endswith(": gloo takes eth0; NCCL takes ib0")


@pytest.mark.slow
def test_a_closed_network_beside_one_that_is_open(nodes: Make) -> None:
    """The names lead to a management network whose high ports are closed."""
    checks = nodes(2)
    name = faults.second_network(checks.lab, 1000, "ib0")
    for host in checks.lab.hosts:
        faults.firewall(checks.lab, host, ports=faults.EPHEMERAL)
    said = checks.run(*WITHOUT_TORCH)
    (finding,) = said[0].findings("links")
    assert "it is open at 10.88.0.2 (ib0), which gloo does not take" in finding["evidence"]
    assert finding["paste"] == f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
    set_there = checks.paste_everywhere(said, "links")
    said = checks.run(env=set_there)
    for each in said:
        # The closed network is still one that a job might take. Nothing else is wrong, and for
        # lack of CPU the reduction may not have been tried.
        assert each.codes == ["DDP053"]
        assert each.status & 3 == 1
    # The same where the rendezvous is in the open network.
    said = checks.run(*WITHOUT_TORCH, "--rdzv-endpoint", f"10.88.0.1:{PORT}")
    set_there = checks.paste_everywhere(said, "gloo-addresses")
    said = checks.run("--rdzv-endpoint", f"10.88.0.1:{PORT}", env=set_there)
    assert all(each.codes == [] for each in said)


@pytest.mark.slow
def test_a_slow_network_beside_a_fast_one(nodes: Make) -> None:
    """The job works by the names, on the management network: it would be slow."""
    checks = nodes(2)
    faults.second_network(checks.lab, 0, "ib0")
    for host in checks.lab.hosts:
        faults.slow_cable(checks.lab, host, megabits=150)
    said = checks.run(*WITHOUT_TORCH)
    for each in said:
        found = each.findings("link-speed")
        if not found:
            # Other work on this machine, which makes every network look slow.
            continue
        assert found[0]["message"].startswith("the job would use a slow network")
        assert found[0]["paste"] == "export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0"
        assert each.status == 1
