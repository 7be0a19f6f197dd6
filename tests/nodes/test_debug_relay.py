"""The relay carries a debugger's bytes between nodes, whatever a node sends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.nodes import link
from ddpdoctor.nodes.debug_relay import HEAD, MAX_RANKS, MAX_STREAMS, WINDOW, DebugRelay
from ddpdoctor.nodes.messages import (
    MESSAGES,
    DebugRank,
    DebugRanks,
    Held,
    StreamClosed,
    StreamData,
    StreamOpened,
    StreamTaken,
)
from ddpdoctor.run.names import CONTROL, debug_socket
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.snapshot import FOREVER

NODE = 1


class End:
    """The relay of one node, with the sockets of its gateway."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.relay = DebugRelay(directory, admits=True)
        self.sent: list[Record] = []
        self.works = True  # Messages can be sent
        self._listeners = []
        self.sockets: list[socket.socket] = []
        for name in (CONTROL, debug_socket(0)):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(directory / name))
            listener.listen()
            self._listeners.append(listener)
            self.sockets.append(listener)

    @property
    def is_connected(self) -> bool:
        """Whether a connection to the debug port waits."""
        return bool(select.select([self._listeners[1]], [], [], 0)[0])

    def accept(self, port: int | None = None) -> socket.socket:
        """Return the relay's connection to the control socket, or to a debug port."""
        accepted, _ = self._listeners[0 if port is None else 1].accept()
        accepted.setblocking(False)
        self.sockets.append(accepted)
        return accepted

    def close(self) -> None:
        self.relay.close()
        for each in self.sockets:
            each.close()


class Pair:
    """The head and another node, which exchange messages at once."""

    def __init__(self, directory: Path) -> None:
        self.head, self.member = End(directory / "head"), End(directory / "member")
        self.head.relay.joined(NODE, "node1", self.to_member)
        self.member.relay.joined(HEAD, "node0", self.to_head)
        self.turn()
        self.gateways = self.head.accept(), self.member.accept()

    def to_member(self, message: Record, blob: bytes) -> bool:
        return _pass(self.head, message, blob, self.member, HEAD)

    def to_head(self, message: Record, blob: bytes) -> bool:
        return _pass(self.member, message, blob, self.head, NODE)

    def turn(self) -> None:
        for _ in range(4):
            self.head.relay.turn()
            self.member.relay.turn()

    def open(self, data: bytes = b"") -> socket.socket:
        """Return a debugger's connection at the head."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self.head.sockets.append(ours)
        self.head.relay.open(theirs, {"node": NODE, "index": 0}, data)
        return ours

    def said(self, node: int) -> list[dict[str, object]]:
        """Return what a gateway was told since the last call."""
        self.turn()
        try:
            lines = self.gateways[node].recv(1 << 20).splitlines()
        except BlockingIOError:
            return []
        return [json.loads(line) for line in lines]

    def say(self, node: int, do: str, **values: object) -> None:
        self.gateways[node].sendall(json.dumps({"do": do, **values}).encode() + b"\n")
        self.turn()


def _pass(end: End, message: Record, blob: bytes, other: End, node: int) -> bool:
    end.sent.append(message)
    if end.works:
        found = link.unpacked(link.packed(message, blob), MESSAGES)
        assert found is not None
        other.relay.take(node, *found)  # type: ignore[arg-type]
    return end.works


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.head.close()
    made.member.close()


def test_bytes_go_both_ways_and_the_end_follows_them(pair: Pair) -> None:
    client = pair.open(b"first ")
    rank = pair.member.accept(0)
    client.send(b"second")
    pair.turn()
    assert rank.recv(100) == b"first second"
    rank.send(b"answer")
    rank.close()
    pair.turn()
    assert client.recv(100) == b"answer"
    assert client.recv(100) == b""


def test_a_slow_end_bounds_what_is_under_way(pair: Pair) -> None:
    client, data = pair.open(), os.urandom(1 << 16)
    rank = pair.member.accept(0)
    sent = 0
    for _ in range(100):
        with contextlib.suppress(BlockingIOError):
            sent += client.send(data)
        pair.turn()
    # The window, and what four sockets of the kernel take.
    assert WINDOW < sent < WINDOW + (4 << 20)
    carried = sum(isinstance(each, StreamData) for each in pair.head.sent)
    assert carried <= WINDOW // 1000
    got = 0
    while got < sent:
        got += len(rank.recv(1 << 20))
        pair.turn()
    client.send(b"more")
    pair.turn()
    assert rank.recv(100) == b"more"


@pytest.mark.parametrize(
    ("message", "blob"),
    [
        (StreamData(number=1, at=7), b"a gap"),
        (StreamData(number=1, at=0), bytes(WINDOW + 1)),
        (StreamClosed(number=1), b""),
    ],
)
def test_a_broken_stream_is_closed_at_both_ends(pair: Pair, message: Record, blob: bytes) -> None:
    client = pair.open()
    rank = pair.member.accept(0)
    pair.to_head(message, blob)
    pair.turn()
    assert client.recv(100) == b""
    if not isinstance(message, StreamClosed):
        assert rank.recv(100) == b""


def test_what_cannot_be_sent_closes_the_stream(pair: Pair) -> None:
    client = pair.open()
    rank = pair.member.accept(0)
    pair.head.works = False
    client.send(b"lost")
    pair.turn()
    assert client.recv(100) == b""
    pair.head.works = True
    rank.send(b"answer")
    pair.turn()
    assert rank.recv(100) == b""


def test_streams_of_no_number_or_from_no_head_are_refused(pair: Pair) -> None:
    for number in (5, -1, 1 << 62):
        pair.to_head(StreamOpened(number=number, index=0), b"")
        pair.to_head(StreamTaken(number=number, at=1 << 62), b"")
        pair.to_head(StreamData(number=number, at=0), b"x")
        pair.to_member(StreamOpened(number=number, index=-1), b"")
        pair.to_member(StreamOpened(number=number, index=10), b"")
    pair.turn()
    assert not pair.member.is_connected
    clients = [pair.open() for _ in range(MAX_STREAMS + 2)]
    pair.turn()
    assert [each.recv(1) for each in clients[-2:]] == [b"", b""]
    with pytest.raises(BlockingIOError):
        clients[0].recv(1)


def test_the_gateway_of_the_head_hears_of_the_ranks(pair: Pair) -> None:
    assert pair.said(0)[0] == {"say": "exchange"}
    pair.say(1, "ranks", ranks=[[0, 3, 77]])
    news = {"say": "node", "node": NODE, "host": "node1"}
    assert pair.said(0)[-1] == {**news, "ranks": [[0, 3, 77]]}
    many = tuple(DebugRank(index=i, rank=i - 1, pid=1) for i in range(2 * MAX_RANKS))
    pair.to_head(DebugRanks(ranks=many), b"")
    (said,) = pair.said(0)
    ranks = said["ranks"]
    assert isinstance(ranks, list) and len(ranks) == MAX_RANKS - 1
    pair.head.relay.gone(NODE, "lost")
    assert pair.said(0) == [{**news, "lost": "lost", "ranks": []}]


def test_each_gateway_hears_whether_ranks_of_others_are_held(pair: Pair) -> None:
    third: list[Record] = []

    def to_third(message: Record, blob: bytes) -> bool:
        third.append(message)
        return True

    pair.head.relay.joined(2, "node2", to_third)
    pair.said(0), pair.said(1)
    pair.say(1, "held", held=True)
    assert pair.said(0) == [{"say": "held", "held": True}]
    assert pair.said(1) == []
    assert third[-1] == Held(held=True)
    pair.say(0, "held", held=True)
    assert pair.said(1) == [{"say": "held", "held": True}]
    pair.say(1, "held", held=False)
    assert pair.said(0) == [{"say": "held", "held": False}]
    assert third[-1] == Held(held=True)
    pair.say(0, "held", held=False)
    assert pair.said(1) == [{"say": "held", "held": False}]
    assert third[-1] == Held(held=False)
    # A node that is lost holds nobody.
    pair.say(1, "held", held=True)
    assert pair.said(0) == [{"say": "held", "held": True}]
    pair.head.relay.gone(NODE, "lost")
    assert {"say": "held", "held": False} in pair.said(0)
    assert third[-1] == Held(held=False)


def test_the_port_of_a_rank_is_the_heads_and_its_state_its_nodes(tmp_path: Path) -> None:
    def record(time: int, state: str, **more: object) -> str:
        return json.dumps({"kind": "debug", "time": time, "state": state, "rank": 1, **more}) + "\n"

    def state() -> tuple[str, int | None, bool]:
        run = RunReader(tmp_path).snapshot()
        found = run.debug_states[1]
        return found.state, found.port, any(span.end == FOREVER for span in run.debugged)

    (tmp_path / "run.json").write_text('{"format": 1}')
    own, theirs = tmp_path / "supervisor.jsonl", tmp_path / "node-1.jsonl"
    theirs.write_text(record(1, "ready", port=5678) + record(2, "waits", port=5678))
    own.write_text("")
    assert state() == ("waits", None, True)
    own.write_text(record(3, "port", port=5679))
    assert state() == ("waits", 5679, True)
    with theirs.open("a") as file:
        file.write(record(4, "attached", port=5678) + record(5, "stopped", port=5678))
    assert state() == ("stopped", 5679, True)
    with own.open("a") as file:
        file.write(record(6, "lost", port=5679, why="the link to node1 is lost"))
    assert state() == ("lost", 5679, False)
    with own.open("a") as file:
        file.write(record(7, "port", port=5680))
    assert state() == ("port", 5680, False)


def test_without_the_option_the_head_debugs_no_rank_of_the_node(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.member.relay._admits = False
    pair.say(1, "ranks", ranks=[[0, 1, 4242]])
    assert pair.member.sent[-1] == DebugRanks(ranks=())
    client = pair.open(b"initialize")
    pair.turn()
    assert not pair.member.is_connected
    assert client.recv(1) == b""
    pair.head.close()
    pair.member.close()
