"""Once a debugger has left a rank the next one attaches, even if the first stays connected."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.debug import clients, dap, gateway
from ddpdoctor.debug.clients import Project
from ddpdoctor.debug.gateway import Gateway
from tests.conftest import LIMIT, ROOT

JOINS = """
import sys, time
sys.path.insert(0, sys.argv[1])
from ddpdoctor.probe.runtime import injected
injected.join(sys.argv[2])
while True:
    time.sleep(0.02)
"""


class Client:
    """A debugger that leaves its connection as it is."""

    wanted: dict[str, Any]  # The child session that was asked for last

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), LIMIT)
        self.events: list[str] = []
        self.decoder = dap.Decoder()
        self._seq = 0

    def send(self, command: str, **arguments: object) -> int:
        self._seq += 1
        request = {"seq": self._seq, "type": "request", "command": command, "arguments": arguments}
        self.socket.sendall(dap.encode(request))
        return self._seq

    def response(self, seq: int) -> dict[str, Any]:
        while data := self.socket.recv(65536):
            found = None
            for message in self.decoder.feed(data):
                if message["type"] == "event":
                    self.events.append(message["event"])
                    if message["event"] == "debugpyAttach":
                        self.wanted = message["body"]
                elif message["type"] == "response" and message["request_seq"] == seq:
                    found = message
            if found is not None:
                return found
        raise AssertionError(f"closed before the answer; events {self.events}")

    def ask(self, command: str, **arguments: object) -> dict[str, Any]:
        return self.response(self.send(command, **arguments))

    def attach(self, **arguments: object) -> None:
        assert self.ask("initialize", adapterID="debugpy")["success"]
        self.send("attach", justMyCode=False, **arguments)
        assert self.ask("configurationDone")["success"]

    def wait_for_end(self) -> None:
        """Read until the other side closes the connection."""
        while data := self.socket.recv(65536):
            for message in self.decoder.feed(data):
                if message["type"] == "event":
                    self.events.append(message["event"])


class Rank:
    """A Python process, and a gateway in this one."""

    def __init__(self, directory: Path, project: Project | None = None) -> None:
        self._directory = directory
        self._news = threading.Event()
        ports = gateway.with_root(gateway.bind_block("127.0.0.1", 0, 1))
        assert ports.root is not None
        self.port, self.root = ports.numbers[0], ports.root.getsockname()[1]
        self.gateway = Gateway(
            ports,
            gateway.RunSockets(directory, 1),
            unidentified=False,
            gate=None,
            ends_job=False,
            hold_errors=False,
            expected=1,
            project=project,
        )
        self.gateway.start(self._news.set)
        self.clients: list[Client] = []
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", JOINS, str(ROOT), str(self._directory)]
        self.process = subprocess.Popen(command)
        self.wait_for("ready")

    def wait_for(self, state: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not any(record.state == state for record in self.gateway.take()):
            assert time.monotonic() < deadline
            self._news.wait(0.1)
            self._news.clear()

    def client(self, port: int = 0) -> Client:
        self.clients.append(Client(port or self.port))
        return self.clients[-1]

    def attach(self) -> Client:
        client = self.client()
        client.attach()
        self.wait_for("attached")
        return client

    def close(self) -> None:
        for client in self.clients:
            client.socket.close()
        self.gateway.stop()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.close()


@pytest.mark.parametrize("command", ["disconnect", "terminate"])
def test_the_seat_is_free_once_a_client_has_left(rank: Rank, command: str) -> None:
    first = rank.attach()
    assert first.ask(command)["success"]
    # Its socket stays open.
    second = rank.attach()
    assert second.ask("threads")["success"]
    first.wait_for_end()
    assert ("terminated" in first.events) == (command == "terminate")


def test_a_client_may_disconnect_once_its_session_is_terminated(rank: Rank) -> None:
    """VS Code does, and reports a connection that is closed before as a crash of the adapter."""
    client = rank.attach()
    assert client.ask("terminate")["success"]
    assert client.ask("disconnect")["success"]
    client.wait_for_end()


def test_a_client_that_leaves_and_reads_no_answer(rank: Rank) -> None:
    first = rank.attach()
    for _ in range(2000):
        first.send("evaluate", expression="'x' * 100_000", context="repl")
    first.send("disconnect")
    rank.wait_for("detached")
    assert rank.attach().ask("threads")["success"]


@pytest.mark.parametrize("command", ["disconnect", "terminate"])
def test_the_session_with_all_ranks_ends_those_that_it_has_started(
    rank: Rank, command: str
) -> None:
    root = rank.client(rank.root)
    root.attach(name="all", connect={"host": "127.0.0.1", "port": rank.root}, ranks=[])
    while "debugpyAttach" not in root.events:
        assert root.ask("threads")["body"] == {"threads": []}
    child = rank.client(root.wanted["connect"]["port"])
    child.attach(**{key: each for key, each in root.wanted.items() if key != "justMyCode"})
    rank.wait_for("attached")
    assert child.ask("threads")["body"]["threads"]
    assert root.ask(command)["success"]
    assert child.ask("disconnect")["success"]
    child.wait_for_end()
    assert child.events.count("terminated") == 1
    rank.wait_for("detached")
    assert rank.attach().ask("threads")["success"]


def test_the_session_with_all_ranks_of_another_project_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    rank = Rank(tmp_path / "run", Project("a.py", (str(tmp_path / "a"),)))
    root = rank.client(rank.root)
    assert root.ask("initialize")["success"]
    refused = root.ask("attach", name="ddpdoctor: attach all ranks", workspaceFolder=str(ROOT))
    rank.close()
    assert not refused["success"] and "a.py" in refused["message"]


def test_a_client_whose_rank_has_ended(rank: Rank) -> None:
    first = rank.attach()
    rank.process.kill()
    rank.process.wait()
    rank.wait_for("gone")
    rank.start()
    assert rank.attach().ask("threads")["success"]
    first.wait_for_end()
    assert "terminated" in first.events


@pytest.mark.parametrize("start", [b"", b"Content-Length: 100\r\n\r\n{"])
def test_a_client_that_never_says_a_whole_message(rank: Rank, start: bytes) -> None:
    first = rank.client()
    first.socket.sendall(start)
    # Beside it another one attaches.
    assert rank.attach().ask("threads")["success"]
    first.wait_for_end()


@pytest.mark.parametrize("rest", [b"", b"Content-Length: 100\r\n\r\n{"])
def test_a_client_that_never_attaches(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    monkeypatch.setattr(clients, "CONFIGURE_TIMEOUT", 5.0)
    first = rank.client()
    assert first.ask("initialize", adapterID="debugpy")["success"]
    first.socket.sendall(rest)
    first.wait_for_end()
    assert "terminated" in first.events
    monkeypatch.setattr(clients, "CONFIGURE_TIMEOUT", 60.0)
    assert rank.attach().ask("threads")["success"]
