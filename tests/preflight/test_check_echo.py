"""Asking a machine for an echo, as ``ping`` does, with the sockets that there are."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.preflight.protocol.wire import echoes
from tests.conftest import ROOT
from tests.lab import faults
from tests.lab.network import Host, Lab, lab, why_not

LIMIT = 0.6
GROUPS = "/proc/sys/net/ipv4/ping_group_range"
ASK = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from ddpdoctor.preflight.protocol.wire import echoes
print(asyncio.run(echoes(sys.argv[2], float(sys.argv[3]))))
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Lab]:
    """Two hosts."""
    if why_not():
        pytest.skip(why_not())
    with lab(2, tmp_path / "lab") as made:
        for host in made.hosts:
            host.run("sh", "-ec", f"echo 0 2147483647 > {GROUPS}")
        yield made


def asked(host: Host, address: str, *before: str) -> bool:
    """What a process on a host finds of an address."""
    said = host.run(*before, sys.executable, "-c", ASK, str(ROOT), address, str(LIMIT))
    assert said in ("True\n", "False\n")
    return said == "True\n"


@pytest.mark.parametrize("groups", ["0 2147483647", "1 0"])
def test_a_machine_that_is_up_answers(hosts: Lab, groups: str) -> None:
    """With a socket that everybody may have, and with the raw one of root."""
    first, second = hosts.hosts
    first.run("sh", "-ec", f"echo '{groups}' > {GROUPS}")
    assert asked(first, second.address)
    # A raw socket gets the request, too, if it comes from this machine.
    assert asked(first, "127.0.0.1")
    faults.no_echo(first)
    assert not asked(first, "127.0.0.1")


@pytest.mark.parametrize("groups", ["0 2147483647", "1 0"])
def test_the_same_over_ipv6(hosts: Lab, groups: str) -> None:
    if not socket.has_ipv6 or not Path("/proc/sys/net/ipv6").exists():
        pytest.skip("this kernel has no IPv6")
    first, second = hosts.hosts
    first.run("sh", "-ec", f"echo '{groups}' > {GROUPS}")
    for host in (first, second):
        address = f"fd77::{host.rank + 1}/64"
        host.run("ip", "address", "add", address, "dev", "eth0", "nodad")
    assert asked(first, "fd77::2")
    assert asked(first, "::1")
    assert not asked(first, "fd77::3")
    assert not asked(first, "fd78::1")


def test_what_does_not_answer_is_not_up(hosts: Lab) -> None:
    first, second = hosts.hosts
    faults.no_echo(second)
    assert not asked(first, second.address)
    assert not asked(first, "10.77.0.99"), "no machine has that address"
    assert not asked(first, "10.99.0.1"), "no way there"


def test_whoever_may_not_ask_is_not_told_that_a_machine_is_up(hosts: Lab) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv, that takes the capabilities away")
    first, second = hosts.hosts
    first.run("sh", "-ec", f"echo 1 0 > {GROUPS}")
    assert not asked(first, second.address, "setpriv", "--bounding-set=-all", "--inh-caps=-all")


def test_an_address_of_no_interface_breaks_nothing() -> None:
    assert not asyncio.run(echoes("fe80::1%nowhere", LIMIT))
