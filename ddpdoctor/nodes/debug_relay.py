"""Debuggers across nodes: the ranks that they hold, and their connections to other nodes.

Each exchange passes on messages from other nodes to its own node's debug gateway, through the
gateway's control socket. A debugger connects to a port of the head. The head's gateway passes the
connection on to the exchange, and the exchange of the rank's node connects to the gateway there,
which serves it like a local debugger.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from ddpdoctor.core.opening import integer
from ddpdoctor.nodes.alignment import parsed
from ddpdoctor.nodes.messages import (
    DebugRank,
    DebugRanks,
    ForDebuggers,
    Held,
    StreamClosed,
    StreamData,
    StreamOpened,
    StreamTaken,
)
from ddpdoctor.run.names import CONTROL, MAX_WORLD_SIZE, debug_socket, short_path
from ddpdoctor.run.records.base import Record
from ddpdoctor.system import peers

WINDOW = 256 << 10  # Maximum bytes of a connection that are sent and not yet delivered
CHUNK = 64 << 10  # Maximum bytes of a message
MAX_STREAMS = 64  # Maximum number of connections with one node
MAX_RANKS = 256  # Maximum number of ranks of one node
MAX_INPUT = 1 << 20  # Maximum bytes of a line from the gateway
RETRY_EVERY = 0.5  # Seconds between two attempts to reach the gateway

HEAD = 0  # The number of the head on the other nodes

Send = Callable[[Record, bytes], bool]


@dataclass
class _Stream:
    """A connection whose other end is on another node."""

    node: int
    number: int
    connection: socket.socket
    sent: int = 0
    taken: int = 0  # Number of sent bytes that the other end has delivered
    received: int = 0
    announced: int = 0  # Number of delivered bytes that were reported to the other end
    pending: bytearray = field(default_factory=bytearray)  # Received and not yet delivered
    closing: bool = False  # Whether the other end is closed

    @property
    def room(self) -> int:
        """Number of bytes that may be sent now."""
        return 0 if self.closing else min(CHUNK, WINDOW - (self.sent - self.taken))


@dataclass
class _Node:
    """Another node."""

    host: str
    send: Send
    linked: bool = True
    held: bool = False  # Whether a debugger holds ranks there
    announced: bool | None = None  # The state of the other nodes that was last sent to it
    ranks: tuple[DebugRank, ...] = ()


class DebugRelay:
    """Connects the debug gateway of this node with those of other nodes.

    ``admits`` lets debuggers of the head attach to ranks of this node (``--debug-nodes``).
    Otherwise anyone who poses as the head could run code here.
    """

    def __init__(self, directory: Path, *, admits: bool) -> None:
        self._directory = directory
        self._admits = admits
        self._nodes: dict[int, _Node] = {}
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._opened = 0
        self._gateway: socket.socket | None = None
        self._input = b""
        self._due = 0.0
        self._held = False  # Whether a debugger holds ranks of this node
        self._announced = False  # Whether the gateway knows that ranks of other nodes are held
        self._ranks: tuple[DebugRank, ...] = ()

    def register(self, poller: zmq.Poller) -> None:
        """Let a poller wake when there is something to do."""
        if self._gateway is not None:
            poller.register(self._gateway, zmq.POLLIN)
        for stream in self._streams.values():
            wanted = (zmq.POLLIN if stream.room else 0) | (zmq.POLLOUT if stream.pending else 0)
            if wanted:
                poller.register(stream.connection, wanted)

    def turn(self) -> None:
        """Read and write without waiting."""
        if self._gateway is None and self._nodes and time.monotonic() >= self._due:
            self._due = time.monotonic() + RETRY_EVERY
            self._connect()
        self._read_gateway()
        for stream in list(self._streams.values()):
            self._pump(stream)
        self._spread()

    def close(self) -> None:
        """Close all connections."""
        for stream in list(self._streams.values()):
            self._drop(stream)
        if self._gateway is not None:
            self._gateway.close()

    # -- other nodes

    def joined(self, node: int, host: str, send: Send) -> None:
        """Note that the link to a node is up, perhaps again after it was lost."""
        self._drop_all(node)
        before = self._nodes.get(node)
        self._nodes[node] = _Node(host, send)
        if before is not None:
            self._nodes[node].held, self._nodes[node].ranks = before.held, before.ranks
        if node == HEAD:
            self._tell_head()
        else:
            self._tell_of(node)

    def gone(self, node: int, why: str) -> None:
        """Note that a node can no longer be reached. ``why`` is shown to the user."""
        found = self._nodes.get(node)
        if found is not None and found.linked:
            found.linked = False
            self._drop_all(node)
            if node != HEAD:
                self._say("node", node=node, host=found.host, lost=why, ranks=[])

    def take(self, node: int, message: ForDebuggers, blob: bytes) -> None:
        """Handle a message from a node."""
        found = self._nodes.get(node)
        if found is None:
            return
        if isinstance(message, Held):
            found.held = message.held
        elif isinstance(message, DebugRanks):
            found.ranks = tuple(
                each
                for each in message.ranks[:MAX_RANKS]
                if 0 <= each.index < MAX_RANKS and 0 <= each.rank < MAX_WORLD_SIZE
            )
            self._tell_of(node)
        elif isinstance(message, StreamOpened):
            if node == HEAD:
                self._open_here(found, message)
        else:
            stream = self._streams.get((node, message.number))
            if stream is not None:
                self._take(stream, message, blob)
            elif isinstance(message, StreamData):
                found.send(StreamClosed(number=message.number), b"")

    def _spread(self) -> None:
        """Tell the gateway and each node whether a debugger holds ranks elsewhere."""
        holding = {number for number, each in self._nodes.items() if each.linked and each.held}
        for number, node in self._nodes.items():
            held = self._held or bool(holding - {number})
            if node.linked and node.announced != held and node.send(Held(held=held), b""):
                node.announced = held
        if self._gateway is not None and self._announced != bool(holding):
            self._announced = bool(holding)
            self._say("held", held=self._announced)

    def _tell_head(self) -> None:
        head = self._nodes.get(HEAD)
        if head is not None and head.linked:
            head.send(DebugRanks(ranks=self._ranks if self._admits else ()), b"")

    # -- the gateway of this node

    def _connect(self) -> None:
        gateway = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with short_path(str(self._directory / CONTROL)) as name:
                gateway.connect(name)
        except OSError:
            # The run has no debugger.
            gateway.close()
            return
        self._gateway, self._input, self._announced = gateway, b"", False
        self._say("exchange")
        for number in self._nodes:
            self._tell_of(number)

    def _say(self, what: str, **values: object) -> None:
        if self._gateway is not None:
            try:
                self._gateway.sendall(json.dumps({"say": what, **values}).encode() + b"\n")
            except OSError:
                self._disconnect()

    def _tell_of(self, number: int) -> None:
        node = self._nodes[number]
        if number != HEAD and node.linked:
            ranks = [[each.index, each.rank, each.pid] for each in node.ranks]
            self._say("node", node=number, host=node.host, ranks=ranks)

    def _read_gateway(self) -> None:
        while self._gateway is not None:
            try:
                data = self._gateway.recv(CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            *lines, self._input = (self._input + data).split(b"\n")
            if not data or len(self._input) > MAX_INPUT:
                self._disconnect()
            for line in lines:
                self._heed(parsed(line) or {})

    def _disconnect(self) -> None:
        if self._gateway is not None:
            self._gateway.close()
        self._gateway, self._held, self._ranks = None, False, ()
        self._tell_head()

    def _heed(self, found: Mapping[str, Any]) -> None:
        """Handle a message from the gateway."""
        if found.get("do") == "held":
            self._held = found.get("held") is True
        elif found.get("do") == "ranks":
            ranks = found["ranks"][:MAX_RANKS]
            self._ranks = tuple(DebugRank(index=i, rank=rank, pid=pid) for i, rank, pid in ranks)
            self._tell_head()

    # -- connections

    def open(self, connection: socket.socket, question: Mapping[str, Any], data: bytes) -> None:
        """Connect a debugger of this node to a rank of another one, and take over the connection.

        The question holds the ``node``, and the ``index`` of the port there. ``data`` holds the
        first bytes.
        """
        number = integer(question, "node")
        node = self._nodes.get(number)
        with contextlib.suppress(OSError):
            trusted = peers.is_trusted(peers.user(connection))
            if node is not None and node.linked and trusted and self._count(number) < MAX_STREAMS:
                self._opened += 1
                stream = _Stream(number, self._opened, connection)
                opened = StreamOpened(number=stream.number, index=integer(question, "index", -1))
                if node.send(opened, b""):
                    self._streams[number, stream.number] = stream
                    self._send(stream, data)
                    return
        connection.close()

    def _open_here(self, node: _Node, message: StreamOpened) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        stream = _Stream(HEAD, message.number, connection)
        free = (HEAD, message.number) not in self._streams and self._count(HEAD) < MAX_STREAMS
        try:
            if not self._admits or not free or not 0 <= message.index < MAX_RANKS:
                raise OSError
            with short_path(str(self._directory / debug_socket(message.index))) as name:
                connection.connect(name)
        except OSError:
            connection.close()
            node.send(StreamClosed(number=message.number), b"")
            return
        self._streams[HEAD, message.number] = stream

    def _count(self, node: int) -> int:
        return sum(number == node for number, _ in self._streams)

    def _take(
        self, stream: _Stream, message: StreamData | StreamTaken | StreamClosed, blob: bytes
    ) -> None:
        if isinstance(message, StreamClosed):
            stream.closing = True
        elif isinstance(message, StreamTaken):
            stream.taken = max(stream.taken, min(message.at, stream.sent))
        elif message.at != stream.received or len(stream.pending) + len(blob) > WINDOW:
            # The link dropped bytes, or the other node ignores the window.
            self._drop(stream)
            return
        else:
            stream.received += len(blob)
            stream.pending += blob
        self._pump(stream)

    def _pump(self, stream: _Stream) -> None:
        """Deliver received bytes, and send those from the local end."""
        try:
            while stream.pending:
                del stream.pending[: stream.connection.send(stream.pending)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(stream)
            return
        delivered = stream.received - len(stream.pending)
        if delivered - stream.announced >= WINDOW // 4:
            taken = StreamTaken(number=stream.number, at=delivered)
            if self._nodes[stream.node].send(taken, b""):
                stream.announced = delivered
        if stream.closing and not stream.pending:
            self._drop(stream)
        elif stream.room > 0:
            try:
                data = stream.connection.recv(stream.room)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self._send(stream, data)
            else:
                self._drop(stream)

    def _send(self, stream: _Stream, data: bytes) -> None:
        message = StreamData(number=stream.number, at=stream.sent)
        stream.sent += len(data)
        if data and not self._nodes[stream.node].send(message, data):
            self._drop(stream)

    def _drop(self, stream: _Stream) -> None:
        """Close a connection at both ends."""
        stream.connection.close()
        found = self._streams.pop((stream.node, stream.number), None)
        if found is not None and not stream.closing:
            stream.closing = True
            self._nodes[stream.node].send(StreamClosed(number=stream.number), b"")

    def _drop_all(self, node: int) -> None:
        for stream in list(self._streams.values()):
            if stream.node == node:
                self._drop(stream)
