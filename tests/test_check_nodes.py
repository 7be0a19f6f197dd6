"""``ddpdoctor check`` across nodes, in a lab of network namespaces: healthy and with faults."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from tests.conftest import ROOT, Doctor
from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Checks, Said
from tests.lab.network import INTERFACE, NETWORK, Host, Lab, lab, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "a lab can be made")

ABOVE_LOOPBACK = "192.168.77"
"""Addresses higher than 127.0.1.1, so that gloo there dials it; those of 10.0.0.0/8 are lower."""


class Make(Protocol):
    """Makes a lab of so many hosts."""

    def __call__(self, size: int, network: str = NETWORK) -> Checks: ...


@pytest.fixture
def nodes(tmp_path: Path, doctor: Doctor) -> Iterator[Make]:
    """Makes a lab of so many hosts."""
    made: list[Checks] = []
    labs: list[contextlib.AbstractContextManager[Lab]] = []

    def make(size: int, network: str = NETWORK) -> Checks:
        holder = lab(size, tmp_path / f"lab{len(labs)}", network)
        made.append(Checks(holder.__enter__(), tmp_path, doctor.environment()))
        labs.append(holder)
        return made[-1]

    before = set(psutil.net_if_addrs())
    yield make
    for checks in made:
        checks.close()
    for holder in labs:
        holder.__exit__(None, None, None)
    assert set(psutil.net_if_addrs()) == before


def silent(said: list[Said]) -> None:
    """Nothing is wrong on any node."""
    for each in said:
        assert each.findings() == [], each.host.name
        assert each.status == 0, (each.host.name, each.document, each.stderr)


def agreeing(said: list[Said], code: str) -> str:
    """The messages of one code, which have to be the same on every node."""
    told = {
        "\n".join(
            finding["message"].replace(", this one", "")
            for finding in each.findings()
            if finding["code"] == code
        )
        for each in said
    }
    assert len(told) == 1, told
    return told.pop()


# Healthy nodes.


def test_two_healthy_nodes_reduce_and_are_given_the_line_that_starts_the_job(nodes: Make) -> None:
    checks = nodes(2)
    said = checks.run()
    silent(said)
    for each in said:
        assert each.outcome("nodes")["detail"] == "2 of 2 nodes are here"
        told = each.outcome("gloo-nodes")["detail"]
        assert told.startswith("2 of 2 nodes, 2 of 2 ranks reduced correctly; bus bandwidth ")
        assert each.outcome("nccl-nodes")["detail"] == "no GPU"
    # The rendezvous port is free again at once.
    host = checks.lab.hosts[0]
    host.run(sys.executable, "-c", f"import socket; socket.create_server(('', {PORT}))")


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_more_healthy_nodes(nodes: Make, size: int) -> None:
    said = nodes(size).run()
    silent(said)
    for each in said:
        assert each.outcome("links")["detail"] == (
            f"{size * (size - 1)} of {size * (size - 1)} ways between nodes are open"
        )
        assert f"{size} of {size} ranks" in each.outcome("gloo-nodes")["detail"]


def test_a_container_bridge_that_nothing_uses_is_no_fault(nodes: Make) -> None:
    checks = nodes(2)
    for host in checks.lab.hosts:
        faults.container_bridge(host)
    silent(checks.run(*WITHOUT_TORCH))


@pytest.mark.slow
def test_a_fraction_of_a_second_between_clocks_is_no_fault(nodes: Make, tmp_path: Path) -> None:
    checks = nodes(2)
    faults.clock_shifted(checks.lab.hosts[1], 0.6, tmp_path)
    silent(checks.run(*WITHOUT_TORCH))


@pytest.mark.slow
def test_nodes_without_node_ranks_find_each_other(nodes: Make) -> None:
    checks = nodes(3)
    running = []
    for host in checks.lab.hosts:
        words = checks.words(host, "--json", *WITHOUT_TORCH)
        at = words.index("--node-rank")
        running.append(checks.start(host, [*words[:at], *words[at + 2 :]]))
    for process, out, err in running:
        assert process.wait(60) == 0, out.read_text() + err.read_text()
        assert "3 of 3 nodes are here" in out.read_text()


def test_slurm_says_it_all(nodes: Make) -> None:
    checks = nodes(2)
    running = []
    for host in checks.lab.hosts:
        slurm = {
            "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(host.rank),
            "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": str(host.rank),
            "SLURM_NNODES": "2", "SLURM_STEP_NODELIST": "node[0-1]",
        }  # fmt: skip
        words = [sys.executable, "-m", "ddpdoctor", "check", "--nproc-per-node", "1"]
        running.append(checks.start(host, [*words, *WITHOUT_TORCH], slurm))
    for rank, (process, out, err) in enumerate(running):
        assert process.wait(60) == 0, out.read_text() + err.read_text()
        assert out.read_text().splitlines()[-1] == (
            f"ddpdoctor run --nnodes 2 --node-rank {rank} --nproc-per-node 1 "
            "--rdzv-endpoint node0:29500 --rdzv-id 77 -- train.py"
        )


def test_of_several_tasks_on_a_node_one_checks(doctor: Doctor) -> None:
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    done = doctor.cli("check", env=slurm)
    assert (done.status, done.stdout) == (0, "left to the first task of this node\n")


@pytest.mark.slow
def test_without_an_endpoint_a_node_asks_for_one(nodes: Make) -> None:
    checks = nodes(1)
    words = [sys.executable, "-m", "ddpdoctor", "check", "--nnodes", "2", "--node-rank", "1"]
    process, out, err = checks.start(checks.lab.hosts[0], [*words, *WITHOUT_TORCH])
    assert process.wait(30) == 2, err.read_text()
    assert "nobody said where the nodes meet" in out.read_text()


# Nodes that do not come together.


def test_an_absent_node_is_named_by_its_rank(nodes: Make) -> None:
    checks = nodes(3)
    said = checks.run("--timeout", "8", *WITHOUT_TORCH, hosts=checks.lab.hosts[:2])
    for each in said:
        assert each.status == 2
        assert "node rank 2 did not come within 4 s" in each.messages
        assert each.outcome("links")["detail"] == "2 of 6 ways between nodes are open"


@pytest.mark.slow
def test_under_slurm_an_absent_node_is_named_by_its_name(nodes: Make) -> None:
    checks = nodes(2)
    slurm = {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "2",
        "SLURM_STEP_NODELIST": "node0,gpu17",
    }  # fmt: skip
    said = checks.run("--timeout", "6", hosts=checks.lab.hosts[:1], env={0: slurm})
    assert "gpu17 (node rank 1) did not come within 3 s" in said[0].messages


@pytest.mark.slow
def test_an_absent_node_is_named_within_half_a_minute(nodes: Make) -> None:
    checks = nodes(2)
    said = checks.run(hosts=checks.lab.hosts[:1])
    assert "node rank 1 did not come within 30 s" in said[0].messages


@pytest.mark.slow
def test_an_endpoint_that_cannot_be_reached_is_told_where_it_is_not(nodes: Make) -> None:
    """Four nodes, each with another reason not to reach the endpoint, at once."""
    checks = nodes(5)
    first, dropped, rejected, nameless, elsewhere = checks.lab.hosts
    faults.firewall(checks.lab, first, source=dropped, ports=PORT)
    faults.firewall(checks.lab, first, source=rejected, ports=PORT, reject=True)
    faults.name_unknown(nameless, first)
    faults.name_wrong(elsewhere, first, "10.77.0.99")
    said = checks.run("--timeout", "24", *WITHOUT_TORCH)
    assert [each.status for each in said] == [2] * 5
    told = [each.findings("nodes")[0]["message"] for each in said]
    assert said[0].messages.splitlines()[:3] == [
        "node rank 3, node rank 4 did not come within 12 s",
        "node2 (node 2, 10.77.0.3) cannot connect to port 29500 of node 0: a firewall rejects it",
        "node1 (node 1, 10.77.0.2) cannot connect to port 29500 of node 0: the packets are dropped "
        "without a word",
    ]
    assert "does not answer: packets to that port are dropped" in told[1]
    assert "cannot be reached: a firewall rejects it (No route to host)" in told[2]
    assert "10.77.0.254 says so by ICMP" in said[2].findings("nodes")[0]["evidence"]
    assert told[3] == "the name node0 is not known on this node"
    assert told[4].startswith("no machine answers at 10.77.0.99")
    pastes = [each.findings("nodes")[0].get("paste", "") for each in said]
    assert f"--dport {PORT} -j ACCEPT" in pastes[1]
    assert pastes[3].endswith(' node0"') and "hostname -I" in pastes[3]


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["and high ports", "alone"])
def test_a_blocked_endpoint_is_told_by_its_cause_while_node_0_still_waits(
    nodes: Make, closed: str
) -> None:
    """What refuses at another port is up; what answers there itself tells node 0 as well."""
    checks = nodes(2)
    first, second = checks.lab.hosts
    faults.firewall(checks.lab, first, ports=PORT)
    if closed == "and high ports":
        faults.firewall(checks.lab, first, ports=faults.EPHEMERAL)
    waiting, out, err = checks.start(first, checks.words(first, "--json", *WITHOUT_TORCH))
    (said,) = checks.run(*WITHOUT_TORCH, hosts=[second])
    (finding,) = said.findings("nodes")
    assert finding["message"] == (
        "node0:29500 (10.77.0.1) does not answer: packets to that port are dropped without a word"
    )
    up = "the machine is up: it answers at port 22"
    if closed == "and high ports":
        assert finding["evidence"] == [up]
        assert waiting.poll() is None
        assert waiting.wait(60) == 2
        assert "waiting for node rank 1; nobody has called port 29500 yet" in err.read_text()
        assert "node rank 1 did not come" in out.read_text()
    else:
        assert finding["evidence"][0].startswith("the check runs there: it answers at port ")
        assert waiting.wait(60) == 2
        assert "node1 (node 1, 10.77.0.2) cannot connect to port 29500" in out.read_text()


@pytest.mark.slow
def test_a_machine_that_answers_nowhere_may_still_come_up(nodes: Make) -> None:
    checks = nodes(2)
    faults.firewall(checks.lab, checks.lab.hosts[0])
    faults.no_echo(checks.lab.hosts[0])
    (said,) = checks.run("--timeout", "40", *WITHOUT_TORCH, hosts=checks.lab.hosts[1:])
    assert "no answer, at other ports neither: it is down, or a firewall" in said.stderr
    assert "at no port that was tried" in said.messages
    assert said.findings("nodes")[0]["paste"].endswith(f"--dport {PORT} -j ACCEPT")


@pytest.mark.parametrize("node_0_runs", [True, False])
@pytest.mark.slow
def test_a_machine_that_answers_only_a_ping_has_a_firewall(nodes: Make, node_0_runs: bool) -> None:
    """Nobody has to wait for the end of half a minute to know that."""
    checks = nodes(2)
    first, second = checks.lab.hosts
    faults.firewall(checks.lab, first)
    if node_0_runs:
        waiting, _, _ = checks.start(first, checks.words(first, "--json", *WITHOUT_TORCH))
    (said,) = checks.run(*WITHOUT_TORCH, hosts=[second])
    (finding,) = said.findings("nodes")
    assert finding["message"] == (
        "node0:29500 (10.77.0.1) does not answer, at no port that was tried: packets are dropped "
        "without a word"
    )
    assert finding["evidence"] == ["the machine is up: it answers a ping"]
    assert finding["paste"].endswith(f"--dport {PORT} -j ACCEPT")
    if node_0_runs:
        assert waiting.poll() is None
        os.killpg(waiting.pid, signal.SIGINT)
        waiting.wait(30)


@pytest.mark.slow
def test_whoever_is_early_waits_for_node_0(nodes: Make) -> None:
    """Longer than it takes to know that a port is blocked."""
    checks = nodes(3)
    early = [
        (host, *checks.start(host, checks.words(host, "--json", *WITHOUT_TORCH)))
        for host in checks.lab.hosts[1:]
    ]
    time.sleep(11)
    silent(checks.run(*WITHOUT_TORCH, hosts=checks.lab.hosts[:1]))
    for _, process, out, err in early:
        assert process.wait(30) == 0, out.read_text() + err.read_text()
        assert "(10.77.0.1): nothing listens there yet; " in err.read_text()


@pytest.mark.slow
def test_something_else_at_the_endpoint_is_told_apart(nodes: Make) -> None:
    checks = nodes(2)
    first = checks.lab.hosts[0]
    served = (
        "import socket\n"
        "server = socket.create_server(('', 29500))\n"
        "while True:\n"
        "    server.accept()[0].send(b'hi' * 99)\n"
    )
    process, _, _ = checks.start(first, [sys.executable, "-c", served])
    said = checks.run("--timeout", "6", *WITHOUT_TORCH)
    assert "port 29500 cannot be listened on here: Address already in use" in said[0].messages
    assert "something else answers at node0:29500 (10.77.0.1)" in said[1].messages
    process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("named", ["another node", "nobody"])
def test_an_endpoint_that_does_not_lead_to_node_0_is_told_there(nodes: Make, named: str) -> None:
    checks = nodes(2)
    first, second = checks.lab.hosts
    if named == "nobody":
        faults.name_wrong(first, second, "10.77.0.99")
    endpoint = ("--rdzv-endpoint", f"node1:{PORT}")
    (said,) = checks.run(*WITHOUT_TORCH, *endpoint, hosts=[first])
    (finding,) = said.findings("nodes")
    address = "10.77.0.99" if named == "nobody" else "10.77.0.2"
    assert finding["message"] == (
        f"the other nodes look for node rank 0 at node1 ({address}), which is no address of this "
        "machine"
    )
    assert finding["paste"].endswith(f"--rdzv-endpoint node0:{PORT}")
    (absence,) = finding["evidence"]
    assert absence.startswith("node rank 1 did not come within ")
    assert absence != "node rank 1 did not come within 30 s", "it did not wait for that"


@pytest.mark.slow
def test_among_containers_an_endpoint_may_lead_to_node_0_only_later(nodes: Make) -> None:
    checks = nodes(2)
    words = (*WITHOUT_TORCH, "--rdzv-endpoint", f"node1:{PORT}", "--timeout", "24")
    kubernetes = {0: {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}}
    (said,) = checks.run(*words, env=kubernetes, hosts=checks.lab.hosts[:1])
    assert said.findings("nodes")[0]["evidence"] == ["node rank 1 did not come within 12 s"]


@pytest.mark.slow
def test_whoever_is_at_the_endpoint_itself_waits_for_node_0(nodes: Make) -> None:
    checks = nodes(2)
    endpoint = ("--rdzv-endpoint", f"node1:{PORT}")
    (said,) = checks.run(*WITHOUT_TORCH, "--timeout", "6", *endpoint, hosts=checks.lab.hosts[1:])
    assert "node1:29500 (10.77.0.2) refuses connections" in said.messages


# Nodes that were told different things.


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
        assert "node rank 3 had not come after" in said[0].messages
        assert "and was not waited for longer" in said[0].messages
        assert "it is 3 on some and 4 on others" in said[0].findings("nodes")[0]["fix"]


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
    assert "node1 (10.77.0.2) came with another rendezvous id" in said[0].messages
    assert "has another rendezvous id than 'other'" in said[1].messages


def test_an_id_that_was_corrected_in_time_is_no_fault(nodes: Make) -> None:
    checks = nodes(2)
    first, second = checks.lab.hosts
    words = checks.words(first, "--json", *WITHOUT_TORCH)
    process, out, err = checks.start(first, words)
    while checks.run(*WITHOUT_TORCH, "--rdzv-id", "typo", "--timeout", "2", hosts=[second])[
        0
    ].messages.startswith("node0:29500 (10.77.0.1) refuses"):
        assert process.poll() is None, err.read_text()
    silent(checks.run(*WITHOUT_TORCH, hosts=[second]))
    assert process.wait(30) == 0, out.read_text()


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
    assert process.wait(30) == 0, out.read_text()


# Ways between nodes.


def test_a_one_way_firewall_is_named_with_its_direction(nodes: Make) -> None:
    """Between three nodes: one way is dropped, another one rejected."""
    checks = nodes(4)
    first, second, third, _ = checks.lab.hosts
    faults.firewall(checks.lab, second, source=first, ports=faults.EPHEMERAL)
    faults.firewall(checks.lab, first, source=third, ports=faults.EPHEMERAL, reject=True)
    said = checks.run(*WITHOUT_TORCH)
    assert agreeing(said, "DDP053").splitlines() == [
        "node2 (node 2) cannot open a connection to node0 (node 0): it is rejected on the way",
        "node0 (node 0) cannot open a connection to node1 (node 1): the packets are dropped "
        "without a word",
    ]
    # Of the two ways gloo uses the first alone.
    found = said[0].findings("links")
    assert [each["severity"] for each in found] == ["error", "warning"]
    assert found[1]["evidence"][1] == "the way back, from node1, is open"
    assert all(each.codes == ["DDP053"] for each in said)


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
        + ("it is rejected" if reject else "the packets are dropped")
    )
    told = "skipped" if used else "pass"
    assert all(each.outcome("gloo-nodes")["status"] == told for each in said)
    assert all(each.status == (2 if used else 1) for each in said)


@pytest.mark.slow
def test_a_node_that_nobody_reaches_is_blamed_as_a_node(nodes: Make) -> None:
    checks = nodes(4)
    faults.firewall(checks.lab, checks.lab.hosts[2], ports=faults.EPHEMERAL)
    said = checks.run(*WITHOUT_TORCH)
    assert agreeing(said, "DDP053") == (
        "no other node can open a connection to node2 (node 2): the packets are dropped without "
        "a word"
    )
    assert "-s 10.77.0.1,10.77.0.2,10.77.0.4" in said[0].findings("links")[0]["paste"]


@pytest.mark.slow
def test_a_node_that_reaches_nobody_is_blamed_as_a_node(nodes: Make) -> None:
    checks = nodes(4)
    blocked = checks.lab.hosts[1]
    for host in checks.lab.hosts:
        if host is not blocked:
            faults.firewall(checks.lab, host, source=blocked, ports=faults.EPHEMERAL)
    said = checks.run(*WITHOUT_TORCH)
    assert agreeing(said, "DDP053") == (
        "node1 (node 1) can open a connection to no other node: the packets are dropped without "
        "a word"
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_large_packets_that_vanish(nodes: Make, size: int) -> None:
    checks = nodes(size)
    faults.packet_size_limit(checks.lab, checks.lab.hosts[1], largest=1400)
    said = checks.run(*WITHOUT_TORCH)
    where = "between node0 (node 0) and node1 (node 1)" if size == 2 else "to and from node1"
    assert f"packets of 1500 bytes vanish {where}" in agreeing(said, "DDP054")
    assert said[0].findings("packet-size")[0]["paste"] == "sudo ip link set dev eth0 mtu 1400"
    assert all(each.codes == ["DDP054"] for each in said)


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
    """What the nodes reach each other by is fast: only gloo's own speed tells."""
    checks = nodes(2)
    named = {"GLOO_SOCKET_IFNAME": faults.second_network(checks.lab, megabits=20)}
    said = checks.run(env={0: named, 1: named})
    for each in said:
        outcome = each.outcome("gloo-nodes")
        assert "2 of 2 ranks reduced correctly; bus bandwidth " in outcome["detail"]
        if outcome["detail"].endswith("not compared: the cores were busy"):
            # Other work on this machine: nothing is said of the network.
            assert outcome["findings"] == []
            continue
        (finding,) = outcome["findings"]
        assert finding["message"].startswith("gloo moves 2.")
        assert finding["severity"] == "warning"
        assert finding["evidence"][0].startswith("node0: gloo 10.88.0.1 (GLOO_SOCKET_IFNAME=eth1)")
        assert finding["paste"] == "export GLOO_SOCKET_IFNAME=eth0"


# The address that gloo gives to others.


@pytest.mark.slow
def test_an_own_name_on_loopback_that_nobody_dials_is_a_warning(nodes: Make) -> None:
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
def test_an_interface_that_reaches_nobody_is_the_wrong_one(nodes: Make) -> None:
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


# What the nodes have.


@pytest.mark.parametrize(
    ("shift", "severity", "status"), [(-20.0, "error", 2), (3.0, "warning", 1)]
)
def test_a_clock_that_is_wrong(
    nodes: Make, tmp_path: Path, shift: float, severity: str, status: int
) -> None:
    checks = nodes(3)
    faults.clock_shifted(checks.lab.hosts[1], shift, tmp_path)
    said = checks.run(*WITHOUT_TORCH)
    side = "behind" if shift < 0 else "ahead of"
    assert agreeing(said, "DDP052") == (
        f"the clock of node1 (node 1) is {abs(shift):.1f} s {side} the others"
    )
    assert {each.findings("clocks")[0]["severity"] for each in said} == {severity}
    assert {each.status for each in said} == {status}


def test_another_torch_and_other_settings(nodes: Make, tmp_path: Path) -> None:
    """The other torch is a shim: the version is read from the file that torch keeps it in."""
    checks = nodes(3)
    shim = tmp_path / "other" / "torch"
    shim.mkdir(parents=True)
    (shim / "__init__.py").write_text("")
    (shim / "version.py").write_text("__version__ = '2.4.1'\n")
    other = {"PYTHONPATH": str(shim.parent), "NCCL_ALGO": "Ring"}
    said = checks.run(*WITHOUT_TORCH, env={2: other})
    told = agreeing(said, "DDP057").splitlines()
    assert told[0].startswith("torch is 2.4.1 on node2 (node 2), and 2.")
    assert told[1] == "NCCL_ALGO is not the same on all nodes"


@pytest.mark.slow
def test_another_commit_and_other_changes(nodes: Make, tmp_path: Path) -> None:
    checks = nodes(4)
    repository = tmp_path / "code"
    repository.mkdir()
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (repository / "train.py").write_text("print(1)\n")
    (repository / "model.py").write_text("width = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    for name in ("later", "changed"):
        subprocess.run(["cp", "-r", str(repository), str(tmp_path / name)], check=True)
    (tmp_path / "later" / "model.py").write_text("width = 2\n")
    later = ["git", "-C", str(tmp_path / "later"), *git[3:]]
    subprocess.run([*later, "commit", "-qam", "two"], check=True)
    (tmp_path / "changed" / "model.py").write_text("width = 3\n")
    script = ("--", str(repository / "train.py"))
    faults.folder_of_its_own(checks.lab.hosts[2], repository, tmp_path / "changed")
    said = checks.run(*WITHOUT_TORCH, *script)
    assert agreeing(said, "DDP058") == (
        "the uncommitted changes are not the same: node2 (node 2) differs from the others"
    )
    faults.folder_of_its_own(checks.lab.hosts[1], repository, tmp_path / "later")
    said = checks.run(*WITHOUT_TORCH, *script)
    assert agreeing(said, "DDP058").startswith(f"the commit of {script[1]} differs: node1 (node 1)")


@pytest.mark.slow
def test_a_folder_that_is_not_shared(nodes: Make, tmp_path: Path) -> None:
    checks = nodes(3)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    silent(checks.run(*WITHOUT_TORCH, "--checkpoint-dir", str(folder)))
    faults.folder_of_its_own(checks.lab.hosts[2], folder, tmp_path / "private")
    said = checks.run(*WITHOUT_TORCH, "--checkpoint-dir", str(folder))
    assert agreeing(said, "DDP059") == (
        f"{folder} is another folder on node2 (node 2) than on node0 (node 0)"
    )
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_shared_folder_of_which_a_node_sees_other_files(nodes: Make, tmp_path: Path) -> None:
    """One folder for all, and in it a file that is longer as one node sees it, as of old caches."""
    checks = nodes(3)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in range(5):
        (folder / f"step{step}.pt").write_bytes(bytes(100))
    words = (*WITHOUT_TORCH, "--checkpoint-dir", str(folder))
    silent(checks.run(*words))
    longer = tmp_path / "longer"
    longer.write_bytes(bytes(200))
    checks.lab.hosts[1].run("mount", "--bind", str(longer), str(folder / "step3.pt"))
    said = checks.run(*words)
    assert agreeing(said, "DDP059") == (
        f"the nodes see the same {folder}, but not the same files in it"
    )
    for each in said:
        (finding,) = each.findings("shared-folder")
        assert (finding["severity"], each.status) == ("warning", 1)
        assert finding["paste"] == f"ls -la {folder}"


def test_a_short_time_limit_leaves_time_for_torch(nodes: Make) -> None:
    silent(nodes(2).run("--timeout", "16", "--only", "nodes,gloo-nodes"))


def test_torch_that_one_node_cannot_import_is_not_waited_for(nodes: Make, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12')\n")
    broken = {1: {"PYTHONPATH": f"{tmp_path}:{ROOT}"}}
    said = nodes(2).run("--only", "nodes,gloo-nodes", env=broken)
    assert agreeing(said, "DDP060") == "torch cannot be imported on node1 (node 1)"


@pytest.mark.parametrize(
    "chosen",
    [
        ("--only", "links"),
        pytest.param(("--skip", "nodes,gloo-nodes"), marks=pytest.mark.slow),
    ],
)
def test_a_check_without_the_other_nodes_is_not_green(nodes: Make, chosen: tuple[str, str]) -> None:
    checks = nodes(3)
    for hosts, why in (
        (checks.lab.hosts[:1], "no other node is here"),
        (checks.lab.hosts[1:2], "this node did not meet the others"),
        (checks.lab.hosts[:2], "2 of 3 nodes are here: 2 of 6 ways between nodes are open"),
    ):
        for each in checks.run("--timeout", "3", *chosen, hosts=hosts):
            assert (each.status, each.outcome("links")["detail"]) == (3, why)


# Two faults at once.


@pytest.mark.slow
def test_two_faults_at_once_are_both_named(nodes: Make, tmp_path: Path) -> None:
    checks = nodes(4)
    faults.firewall(checks.lab, checks.lab.hosts[1], ports=faults.EPHEMERAL)
    faults.clock_shifted(checks.lab.hosts[3], -20, tmp_path)
    said = checks.run()
    assert "no other node can open a connection to node1 (node 1)" in agreeing(said, "DDP053")
    assert "the clock of node3 (node 3) is 20.0 s behind" in agreeing(said, "DDP052")


@pytest.mark.slow
def test_two_faults_of_one_kind_are_both_named(nodes: Make) -> None:
    checks = nodes(4)
    faults.firewall(checks.lab, checks.lab.hosts[1], ports=faults.EPHEMERAL)
    faults.packet_size_limit(checks.lab, checks.lab.hosts[3], largest=1300)
    said = checks.run(*WITHOUT_TORCH)
    assert agreeing(said, "DDP053").startswith("no other node can open a connection to node1")
    assert "vanish to and from node3 (node 3)" in agreeing(said, "DDP054")


# The job itself, after the check.


def line_of(checks: Checks, rank: int) -> str:
    """The line that the check prints on a node."""
    out = checks.directory / f"table{rank}.out"
    return out.read_text().splitlines()[-1]


def print_tables(checks: Checks, script: list[str]) -> list[int]:
    """Run the check for people on all nodes; the exit statuses."""
    running = []
    for host in checks.lab.hosts:
        words = checks.words(host, "--", *script)
        process, out, _ = checks.start(host, words)
        running.append((host, process, out))
    statuses = []
    for host, process, out in running:
        statuses.append(process.wait(100))
        out.rename(checks.directory / f"table{host.rank}.out")
    return statuses


def train(
    checks: Checks, lines: list[str], env: dict[str, str] | None = None
) -> list[tuple[subprocess.Popen[bytes], Path, Path]]:
    running = []
    for host, line in zip(checks.lab.hosts, lines, strict=True):
        words = shlex.split(line)
        assert words[:2] == ["ddpdoctor", "run"]
        own = ["--no-debug", "--no-vscode", "--run-dir", str(checks.directory / f"run{host.rank}")]
        command = [sys.executable, "-m", "ddpdoctor", "run", *own, *words[2:]]
        running.append(checks.start(host, command))
    return running


SCRIPT = [
    str(ROOT / "sample_jobs" / "cifar10.py"),
    "--train-size", "256", "--test-size", "64", "--epochs", "1",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_after_a_green_check_the_line_trains(nodes: Make, size: int) -> None:
    checks = nodes(size)
    assert print_tables(checks, SCRIPT) == [0] * size
    lines = [line_of(checks, rank) for rank in range(size)]
    running = train(checks, lines)
    for process, _out, err in running:
        assert process.wait(120) == 0, err.read_text()
    told = running[0][1].read_text()
    assert f"ranks {size}, device " in told
    assert "summary: 1 epochs, test accuracy" in told


def blocked(checks: Checks) -> None:
    faults.firewall(checks.lab, checks.lab.hosts[0], ports=faults.EPHEMERAL)


def shrunk(checks: Checks) -> None:
    faults.packet_size_limit(checks.lab, checks.lab.hosts[1])


def misnamed(checks: Checks) -> None:
    faults.own_name_is_loopback(checks.lab.hosts[1])


@pytest.mark.slow
@pytest.mark.parametrize("fault", [blocked, shrunk, misnamed])
def test_after_a_red_check_the_line_fails(nodes: Make, fault: Callable[[Checks], None]) -> None:
    checks = nodes(2, ABOVE_LOOPBACK)
    fault(checks)
    assert print_tables(checks, SCRIPT) == [2, 2]
    assert "ddpdoctor run" not in (checks.directory / "table0.out").read_text()
    lines = [
        shlex.join(
            [
                *("ddpdoctor", "run", "--nnodes", "2", "--node-rank", str(rank)),
                *("--nproc-per-node", "1", "--rdzv-endpoint", f"node0:{PORT}", "--", *SCRIPT),
            ]
        )
        for rank in (0, 1)
    ]
    running = train(checks, lines)
    until = time.monotonic() + 40
    while time.monotonic() < until and all(process.poll() is None for process, _, _ in running):
        time.sleep(0.5)
    # A healthy one has ended by now; torch may be silent for 40 minutes, which is not waited for.
    assert not any(process.poll() == 0 for process, _, _ in running)
    assert "train loss" not in running[0][1].read_text()
    for process, _, _ in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    for process, _, _ in running:
        process.wait(45)


# Ctrl-C, and what is left of it.


def running_on(host: Host) -> list[str]:
    """The command lines of ddpdoctor's processes on a host."""
    return [line for line in host.run("ps", "-eo", "args").splitlines() if "ddpdoctor" in line]


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(0.4, marks=pytest.mark.slow),
        1.2,
        pytest.param(2.5, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_leaves_nothing_behind(nodes: Make, after: float) -> None:
    checks = nodes(2)
    running = [checks.start(host, checks.words(host)) for host in checks.lab.hosts]
    time.sleep(after)
    for process, _, _ in running:
        os.killpg(process.pid, signal.SIGINT)
    for process, _, err in running:
        process.wait(20)
        assert "Traceback" not in err.read_text()
    # What had to be entered a namespace by ends at once, and the check inside a moment later.
    until = time.monotonic() + 5
    while any(running_on(host) for host in checks.lab.hosts) and time.monotonic() < until:
        time.sleep(0.1)
    for host in checks.lab.hosts:
        assert running_on(host) == []


@pytest.mark.slow
def test_a_node_that_goes_away_in_the_middle_is_named(nodes: Make) -> None:
    checks = nodes(3)
    faults.firewall(checks.lab, checks.lab.hosts[0], ports=faults.EPHEMERAL)
    running = [
        checks.start(host, checks.words(host, "--json", *WITHOUT_TORCH))
        for host in checks.lab.hosts
    ]
    time.sleep(3)
    os.killpg(running[2][0].pid, signal.SIGKILL)
    for process, out, err in running[:2]:
        assert process.wait(60) == 2, err.read_text()
        assert "node2 (node 2) went away during dialling" in out.read_text()


@pytest.mark.slow
def test_whoever_does_not_know_the_id_learns_nothing(nodes: Make, tmp_path: Path) -> None:
    """A caller from elsewhere is not let in, and does not disturb the nodes."""
    checks = nodes(2)
    first, second = checks.lab.hosts
    knock = (
        "import socket, struct, json, time\n"
        "time.sleep(1)\n"
        "for data in (b'GET / HTTP/1.1\\r\\n\\r\\n', struct.pack('!I', 2**31), b''):\n"
        "    s = socket.create_connection(('node0', 29500), 5)\n"
        "    s.recv(100); s.sendall(data)\n"
        "m = json.dumps({'proof': '0' * 64, 'nonce': '0', 'host': 'x'}).encode()\n"
        "s = socket.create_connection(('node0', 29500), 5)\n"
        "s.recv(100); s.sendall(struct.pack('!I', len(m)) + m)\n"
        "print(s.recv(1000))\n"
    )
    process, out, err = checks.start(first, [sys.executable, "-c", knock])
    began, _, _ = checks.start(first, checks.words(first, *WITHOUT_TORCH))
    time.sleep(3)
    ended, table, _ = checks.start(second, checks.words(second, *WITHOUT_TORCH))
    assert process.wait(20) == 0, err.read_text()
    assert b'"refused":"id"' in out.read_bytes()
    assert began.wait(60) == 2
    assert ended.wait(60) == 2
    assert "2 of 2 nodes are here" in table.read_text()
