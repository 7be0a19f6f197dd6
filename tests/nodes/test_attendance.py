"""``ddpdoctor check`` across nodes, in a lab: nodes that do not come together."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from tests.conftest import LIMIT
from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Make, silent


def test_an_absent_node_is_named_by_its_rank(nodes: Make) -> None:
    checks = nodes(3)
    said = checks.run("--timeout", "8", *WITHOUT_TORCH, hosts=checks.lab.hosts[:2])
    for each in said:
        assert each.status == 2
        assert "node rank 2 did not come within 4 s" in each.messages
        assert each.outcome("links")["detail"] == "2 of 2 directions between nodes are open"


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
def test_an_endpoint_on_localhost_is_told_as_such_and_by_one_finding(nodes: Make) -> None:
    checks = nodes(2)
    said = checks.run("--rdzv-endpoint", "localhost:29500", *WITHOUT_TORCH)
    assert [each.status for each in said] == [2, 2]
    here, there = (each.findings() for each in said)
    assert [each["message"] for each in here] == [
        "node rank 1 did not come within 10 s: on every node, localhost:29500 is that node itself"
    ]
    assert here[0]["paste"].endswith("--rdzv-endpoint node0:29500")
    assert [each["message"] for each in there] == [
        "node 0 is not at localhost:29500: on every node that is the node itself"
    ]
    assert there[0]["paste"].endswith('--rdzv-endpoint "$(hostname):29500"')


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
        "node1 (node 1, 10.77.0.2) cannot connect to port 29500 of node 0: the packets are "
        "silently dropped",
    ]
    assert "does not answer: packets to that port are silently dropped" in told[1]
    assert "cannot be reached: a firewall rejects it (No route to host)" in told[2]
    assert "10.77.0.254 rejects it by ICMP" in said[2].findings("nodes")[0]["evidence"]
    assert told[3] == "the name node0 does not resolve on this node"
    assert told[4].startswith("no machine answers at 10.77.0.99")
    pastes = [each.findings("nodes")[0].get("paste", "") for each in said]
    assert f"--dport {PORT} -j ACCEPT" in pastes[1]
    assert pastes[3].endswith(" node0") and "hostname -I" in pastes[3]


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["and all others", "and high ports", "alone"])
def test_a_blocked_endpoint_is_told_by_its_cause_while_node_0_still_waits(
    nodes: Make, closed: str
) -> None:
    """What refuses at another port is up; what answers there itself tells node 0 as well."""
    checks = nodes(2)
    first, second = checks.lab.hosts
    faults.firewall(checks.lab, first, ports=PORT)
    if closed != "alone":
        faults.firewall(checks.lab, first, ports=faults.EPHEMERAL)
    if closed == "and all others":
        faults.firewall(checks.lab, first, datagrams=True)
    waiting, out, err = checks.start(first, checks.words(first, "--json", *WITHOUT_TORCH))
    (said,) = checks.run(*WITHOUT_TORCH, hosts=[second])
    (finding,) = said.findings("nodes")
    assert finding["message"] == (
        "node0:29500 (10.77.0.1) does not answer: packets to that port are silently dropped"
    )
    up = "the machine is up: it answers at port 22"
    if closed == "and all others":
        assert finding["evidence"] == [up]
        assert waiting.poll() is None
        assert waiting.wait(LIMIT) == 2
        assert "waiting for node rank 1; no node has called port 29500 yet" in err.read_text()
        assert "node rank 1 did not come" in out.read_text()
    else:
        assert finding["evidence"][0].startswith("the check runs there: it answers at port ")
        assert waiting.wait(LIMIT) == 2
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
    faults.firewall(checks.lab, first, datagrams=True)
    if node_0_runs:
        waiting, _, _ = checks.start(first, checks.words(first, "--json", *WITHOUT_TORCH))
    (said,) = checks.run(*WITHOUT_TORCH, hosts=[second])
    (finding,) = said.findings("nodes")
    assert finding["message"] == (
        "node0:29500 (10.77.0.1) does not answer, at no port that was tried: packets are "
        "silently dropped"
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
        assert process.wait(LIMIT) == 0, out.read_text() + err.read_text()
        assert "(10.77.0.1): nothing listens there yet; " in err.read_text()


@pytest.mark.slow
def test_something_else_at_the_endpoint_is_named(nodes: Make) -> None:
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
    assert "port 29500, on which rank 0 will listen, is taken" in said[0].messages
    assert "another program answers at node0:29500 (10.77.0.1)" in said[1].messages
    process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("named", ["another node", "no host"])
def test_an_endpoint_that_does_not_lead_to_node_0_is_told_there(nodes: Make, named: str) -> None:
    checks = nodes(2)
    first, second = checks.lab.hosts
    if named == "no host":
        faults.name_wrong(first, second, "10.77.0.99")
    endpoint = ("--rdzv-endpoint", f"node1:{PORT}")
    (said,) = checks.run(*WITHOUT_TORCH, *endpoint, hosts=[first])
    (finding,) = said.findings("nodes")
    address = "10.77.0.99" if named == "no host" else "10.77.0.2"
    assert finding["message"] == (
        f"the other nodes look for node rank 0 at node1 ({address}), which is not an address of "
        "this machine"
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
    assert "the endpoint node1:29500 is this machine, which is node rank 1" in said.messages


@pytest.mark.slow
def test_a_node_that_is_out_of_files_is_no_firewall(nodes: Make) -> None:
    checks = nodes(8)
    said = checks.run(*WITHOUT_TORCH, before={1: ["prlimit", "--nofile=11:11"]})
    for each in said:
        assert each.status == 2
        (finding,) = each.findings("links")
        message = finding["message"].replace(", this one", "")
        assert message.startswith("node1 (node 1) may open no more files, so ")
        assert finding["paste"] == "ulimit -n 65536"
        assert each.findings("gloo-addresses") == []
        assert each.document["exclude"] == ["node1"]
        assert "Traceback" not in each.stderr
        assert len(each.stderr.splitlines()) <= 3


@pytest.mark.slow
def test_node_0_that_is_out_of_files_is_named_and_nothing_else(nodes: Make) -> None:
    checks = nodes(4)
    said = checks.run("--timeout", "20", *WITHOUT_TORCH, before={0: ["prlimit", "--nofile=15:15"]})
    assert "ulimit -n" in said[0].stderr
    assert said[0].document["exclude"] == ["node0"]
    for each in said:
        assert each.status & 2
        assert "iptables" not in str(each.document)
        assert "another program answers" not in each.messages
        assert "Traceback" not in each.stderr
        assert len(each.stderr.splitlines()) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("pulled", [True, False], ids=["no carrier", "down"])
def test_a_node_whose_own_link_is_down_hears_that(nodes: Make, pulled: bool) -> None:
    checks = nodes(2)
    host = checks.lab.hosts[1]
    if pulled:
        faults.cable_pulled(checks.lab, host)
    else:
        host.run("ip", "link", "set", "eth0", "down")
    (said,) = checks.run(*WITHOUT_TORCH, "--timeout", "30", hosts=[host])
    (finding,) = said.findings()
    assert finding["message"] == "gloo will use eth0, which is down (the host name is 10.77.0.2)"
    state = "has no carrier" if pulled else "is down"
    assert finding["evidence"][-1].endswith(
        f"cannot be reached: the interface eth0 of this machine {state}"
    )
    line = "ip link show dev eth0" if pulled else "sudo ip link set dev eth0 up"
    assert finding["paste"] == line


@pytest.mark.slow
def test_node_0_hears_that_a_node_has_another_id(nodes: Make) -> None:
    checks = nodes(2)
    one, other = ("--rdzv-id", "one"), ("--rdzv-id", "two")
    said = checks.run(*WITHOUT_TORCH, "--timeout", "16", each={0: one, 1: other})
    assert "node rank 1 did not come within 8 s; node1 came with another rendezvous id" in (
        said[0].messages
    )
    assert "is of another job" in said[1].messages


BANNER = """
import socket, time
server = socket.create_server(("", 29500))
while True:
    here = server.accept()[0]
    here.sendall(b"SSH-2.0-OpenSSH_9.6\\r\\n")
    time.sleep(1)
"""


@pytest.mark.slow
def test_a_service_that_says_a_short_line_is_another_program(nodes: Make) -> None:
    checks = nodes(2)
    first, second = checks.lab.hosts
    checks.start(first, [sys.executable, "-c", BANNER])
    faults.until_listening(first, PORT)
    (said,) = checks.run(*WITHOUT_TORCH, "--timeout", "20", hosts=[second])
    (finding,) = said.findings("nodes")
    assert finding["message"].startswith("another program answers at node0:29500")
    assert finding["evidence"] == ["it says 'SSH-2.0-OpenSSH_9.6'"]
