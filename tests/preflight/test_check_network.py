"""``ddpdoctor check`` on names, interfaces and ports: real sockets, real namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.nodes import store
from ddpdoctor.preflight.check import Outcome, Status
from ddpdoctor.preflight.machine import network, own_address, software
from ddpdoctor.preflight.machine.network import (
    Interface,
    Lookup,
    endpoint_name,
    full_name,
    gloo_choice,
    interfaces,
    nccl_choice,
    own_name,
)
from ddpdoctor.preflight.situation import Once, Options, Situation, gpu_facts
from ddpdoctor.system.nvml import GpuFacts, Health
from tests.conftest import Doctor
from tests.support.gpu_stub import device

LO = Interface("lo", ("127.0.0.1", "::1"), loopback=True)
ETH0 = Interface("eth0", ("10.0.0.5", "fe80::1"))
ETH1 = Interface("eth1", ("192.168.7.5",))
DOWN = Interface("eth2", ("10.9.9.9",), running=False)
DOCKER = Interface("docker0", ("172.17.0.1",))
IB = Interface("ib0", ("10.1.0.5",))


def machine(
    *here: Interface,
    name: Lookup | None = None,
    full: Lookup | None = None,
    endpoint: Lookup | None = None,
    nnodes: int = 1,
    gpus: int = 0,
    environ: dict[str, str] | None = None,
) -> Situation:
    """A machine with these interfaces, on which its own name resolves so."""
    once = Once()
    once.put(interfaces, here)
    once.put(own_name, name or Lookup("node1", ("10.0.0.5",)))
    once.put(full_name, full or name or Lookup("node1", ("10.0.0.5",)))
    once.put(endpoint_name, endpoint)
    once.put(gpu_facts, GpuFacts(gpus=tuple(Health(device(index)) for index in range(gpus))))
    options = Options(nproc=2, nnodes=nnodes)
    return Situation(options, environ=environ or {}, hostname="node1", once=once)


def said(outcome: Outcome) -> list[str]:
    return [finding.message for finding in outcome.findings]


# -- which interface


@pytest.mark.parametrize(
    ("chosen", "addresses", "names", "problem"),
    [
        ("", ("10.0.0.5",), ["eth0"], ""),
        ("", ("127.0.1.1",), ["lo"], ""),
        ("", ("8.8.8.8", "192.168.7.5"), ["eth1"], ""),
        ("", (), ["lo"], ""),
        ("eth1,eth0", (), ["eth1", "eth0"], ""),
        ("eth9", (), [], "'eth9' does not exist"),
        ("^docker0", (), [], "'^docker0' does not exist"),
    ],
)
def test_what_gloo_will_choose(
    chosen: str, addresses: tuple[str, ...], names: list[str], problem: str
) -> None:
    environ = {"GLOO_SOCKET_IFNAME": chosen} if chosen else {}
    choice = gloo_choice(environ, (LO, DOCKER, ETH0, ETH1), addresses)
    assert [each.name for each in choice.interfaces] == names
    assert choice.problem == problem


@pytest.mark.parametrize(
    ("environ", "here", "names"),
    [
        ({}, (LO, DOCKER, ETH0, ETH1), ["eth0", "eth1"]),
        ({}, (LO, ETH0, IB), ["ib0"]),
        ({}, (LO, DOCKER), ["docker0"]),
        ({}, (LO,), ["lo"]),
        ({}, (LO, DOWN), ["lo"]),
        ({"NCCL_SOCKET_IFNAME": "eth"}, (LO, ETH0, ETH1), ["eth0", "eth1"]),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, (LO, ETH0, ETH1), []),
        ({"NCCL_SOCKET_IFNAME": "=eth1:1"}, (LO, ETH0, ETH1), ["eth1"]),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker,eth0"}, (LO, DOCKER, ETH0, ETH1), ["eth1"]),
        ({"NCCL_SOCKET_IFNAME": "eth2"}, (LO, ETH0, DOWN), []),
        ({"NCCL_SOCKET_FAMILY": "AF_INET6"}, (LO, ETH0, ETH1), ["eth0"]),
    ],
)
def test_what_nccl_will_choose(
    environ: dict[str, str], here: tuple[Interface, ...], names: list[str]
) -> None:
    assert [each.name for each in nccl_choice(environ, here).interfaces] == names


@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_usual_machine_is_silent(nnodes: int) -> None:
    situation = machine(LO, DOCKER, ETH0, ETH1, DOWN, nnodes=nnodes, gpus=8)
    for check in (network.network_interface, own_address.host_name, network.lookups):
        outcome = check(situation)
        assert (outcome.status, outcome.findings) == (Status.PASS, ())


@pytest.mark.parametrize(
    ("environ", "gpus", "message"),
    [
        ({"GLOO_SOCKET_IFNAME": "ens5"}, 0, "GLOO_SOCKET_IFNAME: 'ens5' does not exist"),
        ({"GLOO_SOCKET_IFNAME": "eth2"}, 0, "gloo will use eth2, which is down (GLOO_SOCKET_IF"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, 0, "GLOO_SOCKET_IFNAME is lo, which reaches no other node"),
        ({"GLOO_SOCKET_IFNAME": "docker0"}, 0, "gloo will use docker0 (GLOO_SOCKET_IFNAME), a br"),
        ({"GLOO_SOCKET_IFNAME": "^lo"}, 0, "GLOO_SOCKET_IFNAME: '^lo' does not exist; gloo takes"),
        ({"NCCL_SOCKET_IFNAME": "ens5"}, 8, "NCCL_SOCKET_IFNAME: 'ens5' matches no running inter"),
        ({"NCCL_SOCKET_IFNAME": "docker0"}, 8, "NCCL will use docker0 (NCCL_SOCKET_IFNAME), a br"),
    ],
)
def test_a_wrong_interface_between_nodes(environ: dict[str, str], gpus: int, message: str) -> None:
    situation = machine(LO, DOCKER, ETH0, DOWN, nnodes=2, gpus=gpus, environ=environ)
    (finding,) = network.network_interface(situation).findings
    assert finding.message.startswith(message)
    assert finding.paste == "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"


def test_what_only_matters_elsewhere_is_not_told() -> None:
    for environ, nnodes in (
        ({"NCCL_SOCKET_IFNAME": "ens5"}, 2),  # no GPU, no NCCL
        ({"GLOO_SOCKET_IFNAME": "lo"}, 1),
        ({"GLOO_SOCKET_IFNAME": "docker0"}, 1),
    ):
        situation = machine(LO, DOCKER, ETH0, nnodes=nnodes, environ=environ)
        assert network.network_interface(situation).status is Status.PASS


def test_the_route_to_the_rendezvous_names_the_interface() -> None:
    """The first outward interface is named where the route tells nothing."""
    situation = machine(LO, DOCKER, ETH1, ETH0, nnodes=2, environ={"GLOO_SOCKET_IFNAME": "lo"})
    (finding,) = network.network_interface(situation).findings
    assert "eth1" in finding.paste


# -- the host name


@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_name_that_does_not_resolve(nnodes: int) -> None:
    name = Lookup("node1", (), 0.1, "Name or service not known")
    outcome = own_address.host_name(machine(LO, ETH0, name=name, nnodes=nnodes))
    assert outcome.status is Status.FAIL
    assert outcome.findings[0].paste == network.hosts_line("10.0.0.5", "node1")


def test_a_full_name_that_does_not_resolve() -> None:
    """The address leads to a full name, by the name server, which is not known."""
    full = Lookup("node1.cluster.local", (), 0.1, "Name or service not known")
    (finding,) = own_address.host_name(machine(LO, ETH0, full=full)).findings
    assert "node1.cluster.local does not resolve" in finding.message
    assert finding.paste == network.hosts_line("10.0.0.5", "node1.cluster.local")


def test_a_name_on_the_loopback_matters_between_nodes_only() -> None:
    name = Lookup("node1", ("127.0.1.1",))
    assert own_address.host_name(machine(LO, ETH0, name=name)).status is Status.PASS
    between = machine(LO, ETH0, name=name, nnodes=2)
    (finding,) = own_address.host_name(between).findings
    assert "node1 resolves to 127.0.1.1: gloo will listen where no other" in finding.message
    assert finding.paste == "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
    assert "10.0.0.5 node1" in finding.fix
    # One fault, one code.
    assert network.network_interface(between).findings == ()
    chosen = machine(LO, ETH0, name=name, nnodes=2, environ={"GLOO_SOCKET_IFNAME": "eth0"})
    assert own_address.host_name(chosen).findings == ()


def test_a_name_that_leads_to_another_machine() -> None:
    name = Lookup("node1", ("10.77.0.1",))
    assert own_address.host_name(machine(LO, ETH0, name=name)).status is Status.WARN
    assert own_address.host_name(machine(LO, ETH0, name=name, nnodes=2)).status is Status.FAIL


def test_slow_and_missing_names() -> None:
    slow = machine(LO, ETH0, name=Lookup("node1", ("10.0.0.5",), 5.2))
    outcome = network.lookups(slow)
    (message,) = said(outcome)
    assert message.startswith("name lookups are slow: node1 takes 5.2 s")
    gone = machine(LO, ETH0, endpoint=Lookup("node0", (), 0.1, "Name or service not known"))
    assert said(network.lookups(gone)) == [
        "the rendezvous host node0 does not resolve: Name or service not known"
    ]


# -- in namespaces of the real kernel


def unshared(*options: str) -> list[str]:
    """The words that start a command in namespaces of its own, or a skip with the reason."""
    command = [shutil.which("unshare") or "unshare", *options]
    try:
        done = subprocess.run([*command, "true"], capture_output=True, text=True)
    except OSError:
        pytest.skip("no unshare here")
    if done.returncode:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")
    return command


def told(result: Any) -> dict[str, Any]:
    assert result.stderr == ""
    return {each["check"]: each for each in json.loads(result.stdout)["checks"]}


CHECK = (sys.executable, "-m", "ddpdoctor", "check", "--json", "--only")


def test_a_network_without_anything(doctor: Doctor) -> None:
    names = "host-name,network-interface,lookups,port"
    result = doctor.run(*unshared("-n"), *CHECK, names, watch=False)
    (finding,) = told(result)["network-interface"]["findings"]
    assert finding["message"].startswith("the loopback interface lo is down")
    assert finding["paste"] == "sudo ip link set dev lo up"
    assert result.status == 2


def test_a_host_name_that_does_not_resolve(doctor: Doctor) -> None:
    """torchrun gives it to the ranks of a single machine as well, and they wait for ever."""
    words = ["sh", "-c", 'hostname nowhere-at-all && exec "$@"', "sh"]
    result = doctor.run(*unshared("-u"), *words, *CHECK, "host-name", watch=False)
    (finding,) = told(result)["host-name"]["findings"]
    assert finding["message"].startswith("this machine's host name nowhere-at-all does not resolve")
    assert finding["paste"].endswith(" nowhere-at-all'")


DEAD = """\
set -e
mount --bind {folder}/resolv.conf /etc/resolv.conf
hostname nowhere-at-all
ip link set lo up
ip link add v0 type veth peer name v1
ip addr add 10.0.0.1/24 dev v0
ip link set v0 up
ip link set v1 up
ip route add default dev v0
ip neigh add 10.255.255.1 lladdr 02:00:00:00:00:09 dev v0
exec "$@"
"""


@pytest.mark.slow
def test_a_name_server_that_is_away(doctor: Doctor) -> None:
    """What is sent to it vanishes, as from a host that was switched off."""
    script = doctor.write("dead.sh", DEAD.format(folder=doctor.directory))
    doctor.write("resolv.conf", "nameserver 10.255.255.1\noptions timeout:9\n")
    alone = unshared("-n", "-m", "-u")
    if shutil.which("ip") is None:
        pytest.skip("no iproute2 here")
    words = ("host-name,lookups", "--rdzv-endpoint", "node0.example:29500")
    result = doctor.run(*alone, "sh", str(script), *CHECK, *words, watch=False)
    if not result.stdout:
        pytest.skip(f"no such network here: {result.stderr}")
    found = told(result)
    (finding,) = found["host-name"]["findings"]
    assert "does not resolve: no answer within 12 s" in finding["message"]
    gone, slow = found["lookups"]["findings"]
    assert "node0.example does not resolve: no answer within 12 s" in gone["message"]
    assert slow["message"].startswith("name lookups are slow: nowhere-at-all takes 12")


# -- the port


@pytest.fixture
def taken() -> Iterator[int]:
    with contextlib.closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def port_check(doctor: Doctor, port: int, *words: str, **env: str) -> Any:
    endpoint = () if env else ("--rdzv-endpoint", f"localhost:{port}")
    return told(doctor.run(*CHECK, "port", *endpoint, *words, env=env, watch=False))["port"]


def test_a_port_that_another_process_holds(doctor: Doctor, taken: int) -> None:
    record = port_check(doctor, taken)
    (finding,) = record["findings"]
    assert finding["message"] == f"port {taken}, on which rank 0 will listen, is taken"
    assert finding["evidence"][0].endswith(f"(pid {os.getpid()})")
    assert len(finding["evidence"]) == 1
    other = int(finding["paste"].split("localhost:")[1].split()[0])
    assert taken < other < taken + 100
    assert port_check(doctor, other)["detail"] == f"{other} is free"


def test_the_store_of_another_job_is_recognized(doctor: Doctor) -> None:
    script = doctor.write(
        "store.py",
        """
        import sys
        import torch.distributed as dist
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        print(store.port, flush=True)
        sys.stdin.read()
        """,
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, env=doctor.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        port = int(process.stdout.readline())
        (finding,) = port_check(doctor, port)["findings"]
        held, store = finding["evidence"]
        assert held.startswith("it is held by the store of another distributed job: ")
        assert store == "it answers in the protocol of torch's TCPStore"
        assert f"(pid {process.pid})" in held
        # The environment's port, as a job that is started by hand has it.
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        (finding,) = port_check(doctor, port, **env)["findings"]
        assert finding["paste"].startswith("export MASTER_PORT=")
        process.stdin.close()


def test_only_node_zero_listens(doctor: Doctor, taken: int) -> None:
    words = ("--nnodes", "2", "--node-rank")
    assert port_check(doctor, taken, *words, "1")["status"] == "skipped"
    assert port_check(doctor, taken, *words, "0")["status"] == "fail"


def test_a_silent_process_is_not_taken_for_a_store(taken: int) -> None:
    assert not store.responds(taken, 0.2)


@pytest.mark.skipif(os.getuid() != 0, reason="setpriv needs the superuser")
def test_a_reserved_port(doctor: Doctor) -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 81:
        pytest.skip("every port is open to every user here")
    dropped = ("setpriv", "--bounding-set", "-all", "--inh-caps", "-all")
    result = doctor.run(*dropped, *CHECK, "port", "--rdzv-endpoint", "localhost:81", watch=False)
    (finding,) = told(result)["port"]["findings"]
    assert finding["message"] == "this user may not listen on port 81"


def test_what_torchs_files_say_is_what_torch_says() -> None:
    import torch

    found = software.installed_torch()
    assert found is not None
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda or "")


# -- whose address it is


def test_without_raw_sockets_no_address_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("socket.socket", refused)
    outcome = own_address.own_address(machine(LO, ETH0, nnodes=2))
    assert (outcome.status, outcome.detail) == (Status.SKIPPED, "raw sockets need root")
    assert own_address.shared_address(machine(LO, ETH0, nnodes=2)) is None


def test_on_one_node_no_address_is_asked_for() -> None:
    assert own_address.own_address(machine(LO, ETH0)).detail == "one node"
