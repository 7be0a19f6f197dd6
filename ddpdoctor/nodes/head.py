"""The head: the ddpdoctor on the node of rank 0, to which all other nodes send their records."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import zmq

from ddpdoctor import __version__
from ddpdoctor.core import opening
from ddpdoctor.nodes import link, messages
from ddpdoctor.nodes.alignment import dumped, place_of
from ddpdoctor.nodes.asking import SOCKET
from ddpdoctor.nodes.debug_relay import DebugRelay
from ddpdoctor.nodes.messages import MESSAGES, PROTOCOL
from ddpdoctor.nodes.shipment import GPUS, NODE, PROCESS, RANK
from ddpdoctor.run import rundir
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.mapped import EXAMINATION, PROFILE, SUSPICION
from ddpdoctor.run.names import CODE, of_node, short_path
from ddpdoctor.run.reader import MAX_RANKS
from ddpdoctor.run.records.base import Part, Record
from ddpdoctor.run.records.base import dataclass as record
from ddpdoctor.run.records.supervisor import NodeRecord
from ddpdoctor.run.ring import SIZE as RING_SIZE
from ddpdoctor.run.rundir import STDERR
from ddpdoctor.run.status import PAGE_SIZE

SILENT_TIMEOUT = 10.0  # Seconds without a message after which a node is lost
MAX_NODES = 4096
MAX_ADDRESSES = 16
MAX_QUESTION = 64 << 10  # Maximum bytes of a question
MAX_ASKERS = 16  # Maximum number of processes that wait for answers
SAME_ATTEMPT_NS = 300 * 10**9
"""Maximum nanoseconds between the starts of an attempt on two nodes."""

JOURNAL = "nodes.jsonl"
_REQUESTS = {EXAMINATION: 8, PROFILE: 8, SUSPICION: 256}
"""The files with which the supervisor sends requests to the ranks, and their sizes."""


@record(frozen=True, slots=True, kw_only=True)
class Invitation(Part):
    """The head's address and secret, with which the other nodes find it."""

    host: str
    addresses: tuple[str, ...]
    port: int
    secret: str


def addresses_of(preferred: str) -> tuple[str, ...]:
    """Return this machine's addresses: that of the ``preferred`` host first, loopback last."""
    own = [
        each.address.partition("%")[0]
        for name, interface in psutil.net_if_addrs().items()
        for each in interface
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    wanted: set[str] = set()
    with contextlib.suppress(OSError):
        wanted = {str(each[4][0]) for each in socket.getaddrinfo(preferred, None)}

    def rank(address: str) -> tuple[bool, bool, bool, bool]:
        local = address.startswith("127.") or address == "::1"
        return local, address not in wanted, address.startswith("fe80:"), ":" in address

    return tuple(sorted(dict.fromkeys(own), key=rank)[:MAX_ADDRESSES])


# -- the files of the other nodes, in the head's run directory


MAX_PROCESSES = 128  # Maximum number of journals of a node's failed processes and loader workers
MAX_NODE_FILES = 16  # Maximum number of other files of a node

_SIZES = {"status": PAGE_SIZE, "collectives": RING_SIZE, "fault": opening.MOST_TEXT}


class RefusedError(Exception):
    """A node sent an invalid message."""


class Mirror:
    """The files of all other nodes, in the head's run directory.

    A node may send anything. So names are checked, sizes are bounded, and a node can only write its
    own files. Their content is checked when it is read, by the decoder of the records.
    """

    def __init__(self, directory: Path, journal_bytes: int) -> None:
        self._directory = directory
        self._journal_bytes = journal_bytes
        self._owners: dict[str, int] = {}
        self._journals: dict[str, Journal] = {}

    def take(self, node: int, pieces: Sequence[messages.Piece], contents: bytes) -> None:
        """Write the parts of files that a node sent one after the other.

        Raises:
            RefusedError: If a name, a size or an owner is wrong. All other pieces are written.
            OSError: If a file cannot be written.
        """
        at = 0
        refused: RefusedError | None = None
        for piece in pieces:
            data = contents[at : at + piece.size]
            if piece.size < 0 or len(data) < piece.size:
                raise RefusedError("a piece is longer than the message")
            at += piece.size
            try:
                self._write(node, piece, data)
            except RefusedError as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def _write(self, node: int, piece: messages.Piece, data: bytes) -> None:
        if GPUS.fullmatch(piece.name) and self._is_of_this_host(piece.name):
            return
        name, limit = self._checked(node, piece.name)
        path = self._directory / name
        if self._owners.setdefault(name, node) != node:
            raise RefusedError(f"{name} belongs to another node")
        if piece.append:
            journal = self._journals.get(name)
            if journal is None:
                journal = self._journals[name] = Journal(str(path), self._journal_bytes)
            journal.write(data.splitlines(keepends=True))
        elif len(data) > limit:
            raise RefusedError(f"{name} is too large")
        elif limit in (PAGE_SIZE, RING_SIZE):
            self._overwrite(path, data, limit)
        else:
            rundir.put(path, data)

    def _checked(self, node: int, name: str) -> tuple[str, int]:
        """Return the name of a file here, and its maximum size.

        Raises:
            RefusedError: If no node has such a file, or the node has too many or does not own it.
        """
        match = RANK.fullmatch(name)
        if match is not None:
            found, limit, most = name, _SIZES.get(match[2], 0), 4 * MAX_RANKS
        elif process := PROCESS.fullmatch(name):
            found, limit, most = f"process-n{node}-{process[1]}", 0, MAX_PROCESSES
        elif name == NODE:
            found, limit, most = f"node-{node}.jsonl", 0, 1
        elif name in (CODE, STDERR):
            found, limit, most = of_node(name, node), opening.MOST_TEXT, 1
        elif GPUS.fullmatch(name):
            found, limit, most = name, opening.MOST_TEXT, MAX_NODE_FILES
        else:
            raise RefusedError("a file that no node has")
        if found not in self._owners:
            kind = found.partition("-")[0]
            owned = sum(
                owner == node and known.startswith(kind) for known, owner in self._owners.items()
            )
            if owned >= most:
                raise RefusedError("too many files")
            if (self._directory / found).exists():
                # It belongs to the head's own rank, or to a node before this process restarted.
                raise RefusedError(f"{found} exists")
        return found, limit

    def _is_of_this_host(self, name: str) -> bool:
        """Return whether the supervisor here writes the file, because both are on one machine."""
        return name not in self._owners and (self._directory / name).exists()

    def _overwrite(self, path: Path, data: bytes, size: int) -> None:
        """Replace the content of a mapped file in place, because readers may have it open."""
        if len(data) != size:
            raise RefusedError(f"{path.name} is cut short")
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close all journals."""
        for journal in self._journals.values():
            with contextlib.suppress(OSError):
                journal.close()


@dataclass
class _Peer:
    """Another node."""

    number: int
    identity: bytes
    host: str
    heard: float
    taken: int = 0
    lost: bool = False
    left: bool = False
    refused: bool = False  # It has sent an invalid message
    clock: messages.Clock | None = None
    attempts: dict[int, int] = field(default_factory=dict)


@dataclass
class _Asker:
    """A process of this node that has asked a question."""

    connection: socket.socket
    until: float
    waiting: set[int]
    data: bytes = b""
    number: int = 0


class Head:
    """Takes the records of all nodes, and passes requests and questions on to them.

    The job's ranks reach this node under the ``preferred`` host.

    Raises:
        OSError: If the run directory cannot be used.
        zmq.ZMQError: If no port is free.
    """

    def __init__(
        self, directory: Path, journal_bytes: int, preferred: str, relay: DebugRelay
    ) -> None:
        self._directory = directory
        self._relay = relay
        self._mirror = Mirror(directory, journal_bytes)
        self._journal = Journal(str(directory / JOURNAL), 1 << 22)
        self._peers: dict[bytes, _Peer] = {}
        self._own: dict[int, messages.Began] = {}
        self._numbered: dict[int, tuple[int, int]] = {}
        """World size and start of the attempts without a rank of this node, by number."""
        self._waiting: list[tuple[_Peer, messages.Began, float]] = []
        self._requested: dict[str, bytes] = {}
        self._askers: list[_Asker] = []
        self._questions = 0
        secret = secrets.token_hex(32)
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = link.authenticate(self._context, secret)
        self._socket = self._context.socket(zmq.ROUTER)
        link.make_server(self._socket, secret)
        try:
            port = self._socket.bind_to_random_port("tcp://*")
        except zmq.ZMQError:
            # The machine has no IPv6.
            self._socket.ipv6 = False
            port = self._socket.bind_to_random_port("tcp://*")
        self.invitation = Invitation(
            host=socket.gethostname(), addresses=addresses_of(preferred), port=port, secret=secret
        )
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with short_path(str(directory / SOCKET)) as name:
            self._listener.bind(name)
        os.chmod(directory / SOCKET, 0o600)
        self._listener.listen(MAX_ASKERS)

    def register(self, poller: zmq.Poller) -> None:
        """Let a poller wake when there is something to do."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._listener, zmq.POLLIN)
        for asker in self._askers:
            if not asker.number:
                poller.register(asker.connection, zmq.POLLIN)

    def began(self, attempt: messages.Began) -> None:
        """Note that ranks of this node began an attempt."""
        self._own[attempt.restart] = attempt

    @property
    def waits_for(self) -> int:
        """Number of nodes that have not left and still respond."""
        return sum(not (each.left or each.lost) for each in self._peers.values())

    @property
    def doubts(self) -> bool:
        """Whether a node may be lost: it has missed two pings, but is not counted as lost yet."""
        now = time.monotonic()
        return any(now - each.heard > SILENT_TIMEOUT / 4 for each in self._linked())

    # -- messages

    def receive(self) -> None:
        """Handle all messages that have arrived."""
        for _ in range(1024):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            found = link.unpacked(frames, MESSAGES) if frames else None
            if found is not None:
                # A node may send anything. Keep serving the other nodes.
                with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
                    self._handle(identity, *found)

    def _handle(self, identity: bytes, message: Record, blob: bytes) -> None:
        peer = self._peers.get(identity)
        if isinstance(message, messages.Hello):
            self._hello(identity, message)
            return
        if peer is None:
            return
        peer.heard = time.monotonic()
        if peer.lost:
            peer.lost = False
            self._note(peer, "back")
            self._relay.joined(peer.number, peer.host, partial(self._send, peer))
        if isinstance(message, messages.Ping):
            self._send(peer, messages.Pong(sent=message.sent, received=time.time_ns()))
        elif isinstance(message, messages.Clock):
            peer.clock = message
            self._note(peer, "clock")
        elif isinstance(message, messages.Began):
            self._waiting.append((peer, message, time.monotonic() + 5.0))
            self._number()
        elif isinstance(message, messages.Files):
            self._take(peer, message, blob)
        elif isinstance(message, messages.Answer):
            self._answer(peer, message, blob)
        elif isinstance(message, messages.ForDebuggers):
            self._relay.take(peer.number, message, blob)
        elif isinstance(message, messages.Leave):
            peer.left = True
            self._note(peer, "left", status=message.status)
            self._relay.gone(peer.number, f"the job has ended on {peer.host}")

    def _hello(self, identity: bytes, message: messages.Hello) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            if len(self._peers) >= MAX_NODES:
                return
            number = len(self._peers) + 1
            peer = _Peer(number, identity, message.host[:255], time.monotonic())
            self._peers[identity] = peer
            if message.protocol != PROTOCOL:
                why = f"its ddpdoctor is {message.version[:32]}, here is {__version__}"
                self._note(peer, "refused", why=why)
                peer.left = True
            else:
                self._note(
                    peer, "joined", directory=message.directory[:4096], version=message.version[:32]
                )
        peer.heard = time.monotonic()
        self._send(
            peer,
            messages.Welcome(
                protocol=PROTOCOL,
                host=self.invitation.host,
                directory=str(self._directory),
                taken=peer.taken,
            ),
        )
        for name, content in self._requested.items():
            self._send(peer, messages.Request(name=name), content)
        if not peer.left:
            self._relay.joined(peer.number, peer.host, partial(self._send, peer))

    def _take(self, peer: _Peer, message: messages.Files, blob: bytes) -> None:
        if message.number == peer.taken + 1:
            try:
                self._mirror.take(peer.number, message.pieces, blob)
            except RefusedError as error:
                # ddpdoctor never sends this, so do not bother the user with it.
                if not peer.refused:
                    peer.refused = True
                    self._note(peer, "joined", why=f"refused: {error}"[:200])
            except OSError as error:
                self._note(peer, "refused", why=f"cannot keep its records: {error.strerror}")
            peer.taken = message.number
        self._send(peer, messages.Taken(number=peer.taken))

    def _send(self, peer: _Peer, message: Record, blob: bytes = b"") -> bool:
        """Send a message. Return whether it could be sent."""
        try:
            self._socket.send_multipart([peer.identity, *link.packed(message, blob)], zmq.NOBLOCK)
        except zmq.ZMQError:
            # A full queue, or a lost connection: the node asks again when it is back.
            return False
        return True

    def _note(self, peer: _Peer, state: str, **more: Any) -> None:
        clock = peer.clock
        record = NodeRecord(
            time=time.time_ns(),
            number=peer.number,
            host=peer.host,
            state=state,
            place=place_of(peer.identity),
            ahead=clock.ahead if clock is not None else None,
            error=clock.error if clock is not None else 0,
            **more,
        )
        with contextlib.suppress(OSError):
            self._journal.write([record])

    # -- attempts

    def _number(self) -> None:
        """Number the attempts of nodes as in this run directory."""
        left = []
        for peer, began, until in self._waiting:
            attempt = self._attempt_of(began, final=time.monotonic() >= until)
            if attempt is None:
                left.append((peer, began, until))
            else:
                peer.attempts[began.restart] = attempt
                self._send(peer, messages.Numbered(restart=began.restart, attempt=attempt))
        self._waiting = left

    def _attempt_of(self, began: messages.Began, *, final: bool) -> int | None:
        """Return the number of an attempt. None if its ranks here may not have begun yet."""
        known = {each.restart: (each.world_size, each.time) for each in self._own.values()}
        near = {
            number: abs(time - began.time)
            for number, (world_size, time) in (known | self._numbered).items()
            if world_size == began.world_size and abs(time - began.time) < SAME_ATTEMPT_NS
        }
        if began.restart in near and near[began.restart] < SAME_ATTEMPT_NS // 10:
            return began.restart
        if near:
            return min(near, key=lambda number: near[number])
        if not final:
            return None
        taken = known.keys() | self._numbered.keys()
        number = began.restart
        while number in taken:
            number += 1
        self._numbered[number] = began.world_size, began.time
        return number

    # -- requests and questions

    def tick(self) -> None:
        """Handle lost nodes, new requests from the supervisor, and overdue answers."""
        now = time.monotonic()
        for peer in self._peers.values():
            if not peer.left and not peer.lost and now - peer.heard > SILENT_TIMEOUT:
                peer.lost = True
                self._note(peer, "lost")
                self._relay.gone(peer.number, f"the link to {peer.host} is lost")
        self._number()
        for name, size in _REQUESTS.items():
            with contextlib.suppress(OSError):
                content = opening.contents(self._directory / name, size)
                if any(content) and self._requested.get(name) != content:
                    self._requested[name] = content
                    for peer in self._linked():
                        self._send(peer, messages.Request(name=name), content)
        for asker in list(self._askers):
            if now >= asker.until:
                self._finish(asker)

    def _linked(self) -> Iterator[_Peer]:
        yield from (each for each in self._peers.values() if not (each.left or each.lost))

    def accept(self) -> None:
        """Handle the processes of this node that ask questions."""
        with contextlib.suppress(BlockingIOError):
            while len(self._askers) < MAX_ASKERS:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._askers.append(_Asker(connection, time.monotonic() + 5.0, set()))
        for asker in list(self._askers):
            if not asker.number:
                self._read_question(asker)

    def _read_question(self, asker: _Asker) -> None:
        try:
            received = asker.connection.recv(MAX_QUESTION)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        asker.data += received
        if not received or len(asker.data) > MAX_QUESTION:
            self._finish(asker)
            return
        if b"\n" not in asker.data:
            return
        line, _, rest = asker.data.partition(b"\n")
        try:
            question = json.loads(line)
            seconds = min(60.0, float(question.get("seconds", 5.0)))
            what = str(question["what"])
        except (ValueError, KeyError, TypeError, AttributeError):
            self._finish(asker)
            return
        if what == "debug":
            self._askers.remove(asker)
            self._relay.open(asker.connection, question, rest)
            return
        self._questions += 1
        asker.number, asker.until = self._questions, time.monotonic() + seconds
        for peer in self._linked():
            asker.waiting.add(peer.number)
            self._send(peer, messages.Question(number=asker.number, what=what), asker.data)
        if not asker.waiting:
            self._finish(asker)

    def _answer(self, peer: _Peer, message: messages.Answer, blob: bytes) -> None:
        asker = next((each for each in self._askers if each.number == message.number), None)
        if asker is None or peer.number not in asker.waiting:
            return
        with contextlib.suppress(ValueError, OSError):
            found = opening.loads(blob)
            line = dumped({"node": peer.number, "host": peer.host, "found": found}) + b"\n"
            # A process that asks reads at once. If it does not, it loses the answer.
            asker.connection.settimeout(1.0)
            asker.connection.sendall(line)
        asker.waiting.discard(peer.number)
        if not asker.waiting:
            self._finish(asker)

    def _finish(self, asker: _Asker) -> None:
        asker.connection.close()
        self._askers.remove(asker)

    # -- the end

    def end_hang(self) -> None:
        """Tell all nodes that the job hangs and was ended here."""
        for peer in self._linked():
            self._send(peer, messages.EndHang())

    def close(self, *, killed: bool = False) -> None:
        """Tell all nodes that the job or ddpdoctor has ended here, and close everything."""
        for peer in self._linked():
            self._send(peer, messages.Over(killed=killed))
        for asker in list(self._askers):
            self._finish(asker)
        self._listener.close()
        with contextlib.suppress(OSError):
            (self._directory / SOCKET).unlink()
        self._mirror.close()
        self._journal.close()
        self._socket.close()
        self._authenticator.stop()
        self._context.term()
