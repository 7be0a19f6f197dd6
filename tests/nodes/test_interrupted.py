"""``ddpdoctor check`` across nodes, in a lab: Ctrl-C, and what is left of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import LIMIT
from tests.lab import faults
from tests.lab.checking import PORT, WITHOUT_TORCH, Make, interrupt
from tests.lab.network import Host


def running_on(host: Host) -> list[str]:
    """The command lines of ddpdoctor's processes on a host."""
    return [line for line in host.run("ps", "-eo", "args").splitlines() if "ddpdoctor" in line]


def wait_for(holds: Callable[[], object]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + LIMIT
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert holds()


def ended(host: Host) -> bool:
    """Whether nothing of ddpdoctor runs on a host."""
    return running_on(host) == []


def listens(host: Host) -> bool:
    """Whether the rendezvous port is open on a host."""
    return f":{PORT} " in host.run("ss", "-Hltn")


def dials_in_vain(host: Host) -> bool:
    """Whether a host is connected to node 0, and dials a port that does not answer."""
    connections = host.run("ss", "-Htan").splitlines()
    met = any("ESTAB" in line and f":{PORT}" in line for line in connections)
    return met and any("SYN-SENT" in line for line in connections)


def forked(host: Host) -> bool:
    """Whether the ranks of the self-test run on a host."""
    return sum("ranks.py" in line for line in running_on(host)) > 1


@pytest.mark.parametrize(
    ("number", "stage"),
    [
        (signal.SIGINT, listens),
        pytest.param(signal.SIGINT, forked, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, running_on, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, listens, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, forked, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_leaves_nothing_behind(
    nodes: Make, number: signal.Signals, stage: Callable[[Host], object]
) -> None:
    checks = nodes(2)
    # At any load torch is imported, and the burn-in lasts until the ranks are seen.
    words = ("--timeout", "100", "--soak", "60")
    running = [checks.start(host, checks.words(host, *words)) for host in checks.lab.hosts]
    wait_for(partial(stage, checks.lab.hosts[0]))
    for process, _, _ in running:
        interrupt(process, number)
    for process, _, err in running:
        process.wait(LIMIT)
        assert "Traceback" not in err.read_text()
    for host in checks.lab.hosts:
        wait_for(partial(ended, host))


@pytest.mark.slow
def test_a_node_that_goes_away_in_the_middle_is_named(nodes: Make) -> None:
    checks = nodes(3)
    faults.firewall(checks.lab, checks.lab.hosts[0], ports=faults.EPHEMERAL)
    running = [
        checks.start(host, checks.words(host, "--json", *WITHOUT_TORCH))
        for host in checks.lab.hosts
    ]
    # It dials the closed ports of node 0 for some seconds.
    wait_for(partial(dials_in_vain, checks.lab.hosts[2]))
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
        "def open():\n"
        "    try: socket.create_connection(('node0', 29500), 5).close(); return True\n"
        "    except OSError: time.sleep(0.1)\n"
        "while not open(): pass\n"
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
    assert process.wait(LIMIT) == 0, err.read_text()
    other, table, _ = checks.start(second, checks.words(second, *WITHOUT_TORCH))
    assert b'"refused":"id"' in out.read_bytes()
    # Strangers change no verdict.
    assert began.wait(LIMIT) == 0
    assert other.wait(LIMIT) == 0
    assert table.read_text().startswith("no fault found: node1 (node 1 of 2)")
