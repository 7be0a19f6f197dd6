"""``ddpdoctor check`` across nodes, in a lab: after the line to paste, the check is green."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Make, agreeing, silent

BY_ADDRESS = ("--rdzv-endpoint", f"192.168.77.1:{PORT}")
ABOVE_LOOPBACK = "192.168.77"


@pytest.mark.parametrize(
    "stale", [pytest.param("192.168.77.40", marks=pytest.mark.slow), "127.0.1.1"]
)
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
    # For lack of CPU the reduction may not have been tried.
    assert all(each.codes == [] for each in said)


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


def typed(finding: dict[str, Any]) -> list[str]:
    """The options of a line that starts the check. Given last, they win."""
    words = shlex.split(finding["paste"])
    assert words[:2] == ["ddpdoctor", "check"]
    return words[2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        {2: ("--node-rank", "1")},
        {1: ("--nnodes", "4")},
        {2: ("--nproc-per-node", "2")},
    ],
)
def test_options_that_differ(nodes: Make, wrong: dict[int, Sequence[str]]) -> None:
    checks = nodes(3)
    said = checks.run(*WITHOUT_TORCH, each=wrong)
    lines = {
        each.host.rank: typed(each.findings("same-job")[0])
        for each in said
        if each.host.rank in wrong or "--nnodes" in wrong.get(1, ())
    }
    silent(checks.run(*WITHOUT_TORCH, each=lines))


@pytest.mark.slow
@pytest.mark.parametrize("set_on", [(0, 1), (2,)])
def test_a_variable_that_differs(nodes: Make, set_on: tuple[int, ...]) -> None:
    checks = nodes(3)
    ring = {"NCCL_ALGO": "Ring"}
    chosen = dict.fromkeys(set_on, ring)
    (finding,) = checks.run(*WITHOUT_TORCH, env=chosen)[0].findings("node-versions")
    if set_on == (2,):
        assert finding["paste"] == "unset NCCL_ALGO"
        silent(checks.run(*WITHOUT_TORCH))
        return
    assert finding["paste"] == "export NCCL_ALGO=Ring"
    silent(checks.run(*WITHOUT_TORCH, env=dict.fromkeys(range(3), ring)))


@pytest.mark.slow
def test_a_checkpoint_folder_that_is_not_there(nodes: Make, tmp_path: Path) -> None:
    checks = nodes(2)
    folder = ("--checkpoint-dir", str(tmp_path / "new" / "run7"))
    (finding,) = checks.run(*WITHOUT_TORCH, *folder)[0].findings("shared-folder")
    assert finding["paste"] == f"mkdir -p {folder[1]}"
    checks.paste(checks.lab.hosts[0], finding)
    silent(checks.run(*WITHOUT_TORCH, *folder))


@pytest.mark.slow
def test_another_commit(nodes: Make, tmp_path: Path) -> None:
    checks = nodes(3)
    code, git = tmp_path / "code", ("git", "-c", "user.name=x", "-c", "user.email=x@x")
    code.mkdir()
    (code / "train.py").write_text("print()\n")
    make = f"{shlex.join(git)} commit -qm"
    script = f"cd {code} && git init -q && git add . && {make} one && echo >> train.py && "
    checks.lab.hosts[0].run("sh", "-ec", f"{script} git add . && {make} two")
    third = checks.lab.hosts[2]
    older = tmp_path / "older"
    third.run("cp", "-r", str(code), str(older))
    third.run("git", "-C", str(older), "checkout", "-q", "HEAD~1")
    third.run("mount", "--bind", str(older), str(code))
    words = (*WITHOUT_TORCH, "--", str(code / "train.py"))
    found = checks.run(*words)[2].findings("same-code")
    (line,) = {each["paste"] for each in found if each["paste"].startswith("git checkout ")}
    third.run("sh", "-ec", f"cd {code} && {line}")
    silent(checks.run(*words))


@pytest.mark.slow
def test_a_smaller_mtu_on_one_node(nodes: Make) -> None:
    checks = nodes(3)
    checks.lab.hosts[2].run("ip", "link", "set", "dev", "eth0", "mtu", "1400")
    (finding,) = checks.run(*WITHOUT_TORCH)[0].findings("packet-size")
    for host in checks.lab.hosts:
        checks.paste(host, finding)
    silent(checks.run(*WITHOUT_TORCH))


@pytest.mark.slow
def test_a_name_that_a_node_does_not_know(nodes: Make) -> None:
    """The line is typed on the machine that has the name, and prints what is missing elsewhere."""
    checks = nodes(2)
    first, second = checks.lab.hosts
    faults.name_unknown(second, first)
    (said,) = checks.run(*WITHOUT_TORCH, "--timeout", "20", hosts=[second])
    (finding,) = said.findings()
    printed = first.run("sh", "-ec", finding["paste"]).strip()
    second.write_hosts([*second.hosts_lines(), printed])
    silent(checks.run(*WITHOUT_TORCH))


CLOSED = {
    "the rendezvous port": (0, "INPUT -p tcp --dport 29500"),
    "high ports": (0, "INPUT -p tcp --syn --dport 32768:65535"),
    "high ports of the other": (1, "INPUT -p tcp --syn --dport 32768:65535"),
    "what comes back": (1, "INPUT -p tcp"),
}


@pytest.mark.slow
@pytest.mark.parametrize("six", [False, True], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("closed", CLOSED)
def test_a_firewall_of_the_machine(nodes: Make, closed: str, six: bool) -> None:
    """The lines of the first node that has one are typed where they belong, until all is open."""
    tables = "ip6tables" if six else "iptables"
    if shutil.which(tables) is None:
        pytest.skip(f"no {tables} here")
    checks = nodes(2)
    if six:
        for host in checks.lab.hosts:
            host.run("ip", "address", "add", f"fd00:77::{host.rank + 1}/64", "dev", "eth0", "nodad")
            host.write_hosts(["::1 localhost", "fd00:77::1 node0", "fd00:77::2 node1"])
    at, rule = CLOSED[closed]
    checks.lab.hosts[at].run("sh", "-ec", f"{tables} -A {rule} -j DROP")
    said = checks.run(*WITHOUT_TORCH, "--timeout", "60")
    found = [each.findings("nodes", "links") for each in said]
    finding = (found[at] or found[1 - at])[0]
    assert tables in finding["paste"]
    checks.paste(checks.lab.hosts[at], finding)
    silent(checks.run())
