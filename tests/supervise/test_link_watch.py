"""The links to other nodes that are measured while ranks wait."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import Record, as_json, json_line
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase
from ddpdoctor.supervise.slow_ranks import LinkWatch
from ddpdoctor.system import network, proc
from ddpdoctor.system.network import Traffic
from tests.support.hanging_ranks import status
from tests.support.written import T0, Written

BEFORE = Traffic("10.0.0.1", "10.0.0.2", 0.02, 0, 0, 0.0)


def measured(
    monkeypatch: pytest.MonkeyPatch, *after: Traffic, wait: int = 80, world_size: int = 2
) -> list[Any]:
    """What is recorded of connections that were new ten seconds before."""
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    seen = [dict.fromkeys(range(len(after)), BEFORE), dict(enumerate(after))]
    found: list[Record] = []
    watch = LinkWatch(found.append, lambda _: seen.pop(0))
    step = StepRecord(step=1, total=100, wait=wait, backward=9, split=True)
    line = json_line(as_json(step))
    opened = OpenRecord(format=FORMAT, rank=0, world_size=world_size)
    page = status(0, Phase.WAIT)
    run = Run(Path("/run"), {}, (Rank(0, 0, page, opened, step_lines=(line,) * 9),))
    for _ in range(2):
        watch.look(run)
        clock += 10.0
    return found


FULL = BEFORE._replace(sent=40_000_000, rate=5_000_000, busy=8.0)


def test_a_link_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = measured(monkeypatch, FULL)
    assert (found.source, found.target, found.seconds) == ("10.0.0.1", "10.0.0.2", 10.0)
    assert (found.busy, found.rate, found.sent) == (0.8, 5_000_000, 40_000_000)


@pytest.mark.parametrize(
    "traffic",
    [
        # Small messages whose acknowledgements are late.
        FULL._replace(rate=1_000_000_000),
        FULL._replace(busy=1.0),
    ],
)
def test_a_link_that_is_not_full(monkeypatch: pytest.MonkeyPatch, traffic: Traffic) -> None:
    (found,) = measured(monkeypatch, traffic)
    assert found.busy == found.rate == 0


def test_several_connections_share_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = measured(monkeypatch, FULL, FULL)
    assert (found.busy, found.rate, found.sent) == (0.8, 10_000_000, 80_000_000)


@pytest.mark.parametrize(("wait", "world_size"), [(30, 2), (80, 1)])
def test_nothing_is_measured_that_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch, wait: int, world_size: int
) -> None:
    assert measured(monkeypatch, FULL, wait=wait, world_size=world_size) == []


def test_the_kernel_counts_what_a_connection_sends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with (
            socket.create_connection(address, source_address=("127.0.0.2", 0)) as client,
            server.accept()[0] as there,
        ):
            own = proc.sockets(Path("/proc/self"))
            client.sendall(b"." * 5000)
            assert len(there.recv(5000, socket.MSG_WAITALL)) == 5000
            found = network.traffic(own)
    (sent,) = (each for each in found.values() if each.source == "127.0.0.2")
    assert sent.target == "127.0.0.1" and 0 < sent.sent <= 5001 and sent.rtt > 0


# -- the rule


def full(written: Written, *busy: float, host: str = "node1", target: str = "10.0.0.2") -> None:
    """What two nodes recorded of the link between them."""
    there = {"host": "node0", "source": "10.0.0.1", "target": target, "rate": 4_800_000}
    back = {"host": host, "source": "10.0.0.2", "target": "10.0.0.1"}
    common = {"kind": "link", "time": T0, "seconds": 10.0, "sent": 40_000_000, "rtt": 0.039}
    written.supervisor += [{**common, **there, "busy": each} for each in busy]
    written.supervisor.append({**common, **back})
    written.rank(0, [])


def test_a_full_link_is_named(written: Written) -> None:
    full(written, 0.0, 0.8, 0.79)
    (found,) = written.findings()
    assert (found.code, found.severity) == ("DDP056", Severity.INFO)
    assert found.message.startswith("the link from node0 to node1 is full: it delivers 38 Mbit/s")
    assert "for 79 % of 10 s, round trip 39.0 ms" in found.evidence[0]


@pytest.mark.parametrize(
    ("busy", "more"),
    [
        ((0.8,), {}),
        ((0.8, 0.8, 0.0), {}),
        # To a server that is no node, and to an address that both nodes have.
        ((0.8, 0.8), {"target": "10.9.9.9"}),
        ((0.8, 0.8), {"host": "node0"}),
    ],
)
def test_no_link_is_named(written: Written, busy: tuple[float, ...], more: dict[str, str]) -> None:
    full(written, *busy, **more)
    assert written.findings() == []
