"""``ddpdoctor check`` across nodes, in a lab: Ctrl-C, and what is left of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import LIMIT
from tests.lab import faults
from tests.lab.checking import WITHOUT_TORCH, Make, interrupt
from tests.lab.network import Host


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
        interrupt(process)
    for process, _, err in running:
        process.wait(LIMIT)
        assert "Traceback" not in err.read_text()
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
        assert process.wait(LIMIT) == 2, err.read_text()
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
    assert process.wait(LIMIT) == 0, err.read_text()
    assert b'"refused":"id"' in out.read_bytes()
    # Strangers change no verdict.
    assert began.wait(LIMIT) == 0
    assert ended.wait(LIMIT) == 0
    assert "2 of 2 nodes are here" in table.read_text()
