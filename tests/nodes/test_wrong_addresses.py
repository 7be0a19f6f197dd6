"""``ddpdoctor check`` across nodes, in a lab: addresses that are another node's, or translated."""

from __future__ import annotations

import shlex
import sys

import pytest

from tests.conftest import LIMIT
from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Make, agreeing
from tests.lab.network import INTERFACE


@pytest.mark.slow
def test_an_endpoint_that_is_another_node_is_named_there(nodes: Make) -> None:
    said = nodes(2).run(*WITHOUT_TORCH, "--rdzv-endpoint", f"node1:{PORT}", "--timeout", "24")
    here, there = (each.findings("nodes")[0]["message"] for each in said)
    assert here.startswith("the other nodes look for node rank 0 at node1 (10.77.0.2)")
    assert there == (
        f"the endpoint node1:{PORT} is this machine, which is node rank 1: node rank 0 is not here"
    )


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False], ids=["its own address is closed", "it is open"])
def test_a_node_behind_a_load_balancer_is_told_so(nodes: Make, closed: bool) -> None:
    """What it sends to node 0 comes from another address, at which none of its ports is."""
    checks = nodes(4)
    first, second, third, balancer = checks.lab.hosts
    words = [sys.executable, "-c", faults.FORWARDS, first.name, str(PORT)]
    process, _, _ = checks.start(balancer, words)
    faults.name_wrong(second, first, balancer.address)
    if closed:
        faults.firewall(checks.lab, second, ports=faults.EPHEMERAL)
    said = checks.run(
        *WITHOUT_TORCH, "--nnodes", "3", "--timeout", "120", hosts=[first, second, third]
    )
    process.kill()
    told = agreeing(said, "DDP053")
    if not closed:
        # gloo dials it at its own address, which is open.
        assert told == ""
        return
    assert told == (
        "no other node can open a connection to node1 (node 1): an address is translated on the "
        "way (NAT, a tunnel, a container's network)"
    )
    (finding,) = said[0].findings("links")
    assert finding["evidence"][0] == "node1 has 10.77.0.2, and is seen at 10.77.0.4"
    assert "gloo and NCCL announce a machine's own addresses" in finding["fix"]
    assert "iptables" not in finding["paste"]


@pytest.mark.slow
def test_another_job_on_the_port_fails_no_complete_job(nodes: Make) -> None:
    checks = nodes(4)
    first, second, third, fourth = checks.lab.hosts
    own = ("--nnodes", "2", *WITHOUT_TORCH, "--timeout", "120")
    running = [
        checks.start(host, checks.words(host, "--json", *own, "--rdzv-id", "one"))
        for host in (first, second)
    ]
    others = [
        checks.start(
            host,
            checks.words(
                host, "--json", *own, "--rdzv-id", "two", "--node-rank", str(rank),
            ),
        )
        for rank, host in ((1, third), (1, fourth))
    ]  # fmt: skip
    for process, out, err in running:
        assert process.wait(LIMIT) == 0, out.read_text() + err.read_text()
    for process, out, _ in others:
        assert process.wait(LIMIT) & 2
        text = out.read_text()
        if "had all its nodes" not in text:
            assert "is of another job" in text or "refuses" in text


@pytest.mark.slow
def test_a_check_of_another_job_holds_the_port_on_this_machine(nodes: Make) -> None:
    checks = nodes(2)
    first = checks.lab.hosts[0]
    patient = (*WITHOUT_TORCH, "--timeout", "200")
    waiting, _, _ = checks.start(first, checks.words(first, *patient, "--rdzv-id", "one"))
    faults.until_listening(first, PORT)
    (said,) = checks.run(*patient, "--rdzv-id", "two", hosts=[first])
    (finding,) = said.findings("nodes")
    assert "is of another job: it has another rendezvous id" in finding["message"]
    assert "--rdzv-id two" in finding["paste"]
    waiting.kill()


@pytest.mark.slow
def test_every_node_shows_what_is_wrong_with_each_machine(nodes: Make) -> None:
    checks = nodes(2)
    words = shlex.join(
        [sys.executable, "-m", "ddpdoctor", *checks.words(checks.lab.hosts[1])[3:], *WITHOUT_TORCH]
    )
    second = checks.start(
        checks.lab.hosts[1], ["sh", "-c", f"ulimit -n 128; exec {words} --json --timeout 200"]
    )
    (first,) = checks.run(*WITHOUT_TORCH, "--timeout", "200", hosts=checks.lab.hosts[:1])
    assert second[0].wait(LIMIT) == 2
    assert first.status == 0
    assert "node1 (node 1): a process may open 128 files" in first.messages
    assert first.document["exclude"] == ["node1"]
    (zero, one) = first.document["nodes"]
    assert (zero["exclude"], one["exclude"]) == (False, True)
    assert [each["check"] for each in one["findings"]] == ["limits"]


def test_an_address_that_another_machine_has_as_well(nodes: Make) -> None:
    checks = nodes(3)
    _, second, third = checks.lab.hosts
    faults.address_of(third, second)
    said = checks.run("--only", "own-address")
    assert [each.codes for each in said] == [[], ["DDP018"], ["DDP018"]]
    card = second.run("cat", f"/sys/class/net/{INTERFACE}/address").strip()
    (finding,) = said[2].findings()
    assert finding["evidence"] == [f"asked by ARP on {INTERFACE}, {card} answers for 10.77.0.2"]


def test_an_own_second_card_in_the_network_is_no_other_machine(nodes: Make) -> None:
    checks = nodes(2)
    host = checks.lab.hosts[1]
    faults.second_card(checks.lab, host)
    (said,) = checks.run("--only", "own-address", hosts=[host])
    assert said.codes == []
    assert said.outcome("own-address")["detail"] == "asked by ARP for 10.77.0.2"


@pytest.mark.slow
def test_two_machines_with_one_address(nodes: Make) -> None:
    """What is sent to one arrives at the other: no firewall is blamed for that."""
    checks = nodes(3)
    _, second, third = checks.lab.hosts
    faults.address_of(third, second)
    said = checks.run(*WITHOUT_TORCH, "--timeout", "60")
    message = "another machine has this machine's address, 10.77.0.2: packets for one arrive at "
    for each in said[1:]:
        assert each.findings("own-address")[0]["message"] == message + "the other"
        assert not any("firewall" in found["fix"] for found in each.findings())
        # What it leads to on the links is seen on this node, and no fault of its own.
        assert not each.findings("links")
    assert not said[0].findings("own-address")
