"""A node that is not the head: it sends its records, and answers for its ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import zmq

from ddpdoctor import __version__
from ddpdoctor.core import opening
from ddpdoctor.nodes import link, messages
from ddpdoctor.nodes.alignment import Alignment, HeadClock, dumped, place_of
from ddpdoctor.nodes.debug_relay import HEAD, DebugRelay
from ddpdoctor.nodes.head import Invitation
from ddpdoctor.nodes.messages import MESSAGES, PROTOCOL
from ddpdoctor.nodes.shipment import Shipment
from ddpdoctor.run.mapped import EXAMINATION, PROFILE, SUSPICION, moved_suspicion
from ddpdoctor.run.records.base import Record

SHIP_EVERY = 1.0  # Seconds between two messages with files
PING_EVERY = 1.0
FIRST_PINGS = 8  # Number of pings in quick succession, to estimate the clock
MAX_PENDING = 4  # Maximum number of messages with files that the head has not confirmed
LOST_TIMEOUT = 15.0  # Seconds without a message after which the head is lost
CONNECT_TIMEOUT = 1.5  # Seconds to try one address of the head
WELCOME_TIMEOUT = 20.0  # Seconds for the head to accept a connection
MAX_QUESTIONS = 8  # Maximum number of questions that are answered at the same time
SMALL_CHANGE_NS = 1_000_000  # Maximum change of the clock's estimate that is not sent


class Member:
    """The link to the head, to which ``identity`` identifies this node across reconnections.

    ``answer`` answers a question about the ranks of this node with JSON, in a thread.
    """

    def __init__(
        self, directory: Path, identity: bytes, answer: Callable[[str, Any], Any], relay: DebugRelay
    ) -> None:
        self._directory = directory
        self._relay = relay
        self._identity = identity
        self._answer = answer
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[Any] | None = None
        self.invitation: Invitation | None = None
        """The head's address, once it is known."""
        self._tried: deque[str] = deque()
        self._since = 0.0
        self._heard = 0.0
        self._refused = False  # Whether the head uses another version of the protocol
        self.head: messages.Welcome | None = None
        """The head, while the link to it is up."""
        self.over = False  # Whether the job has ended on the head
        self.hangs = False  # Whether the head has ended its part of the job, which hangs
        self._clock = HeadClock()
        self._announced: messages.Clock | None = None
        self._pinged = 0.0
        self._began: dict[int, messages.Began] = {}
        self._asked: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._shipment = Shipment(directory)
        self._due = 0.0
        self._number = 0
        self._pending: deque[tuple[int, list[bytes]]] = deque()
        self._working = 0  # Number of unanswered questions
        self._answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._awake, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def looks_for_head(self) -> bool:
        """Whether there is no connection, and one to a new head would help."""
        return self._socket is None and not self._refused

    def invite(self, invitation: Invitation) -> None:
        """Connect to a head."""
        self.invitation = invitation
        self._tried = deque(invitation.addresses)
        self._connect()

    def _connect(self) -> None:
        """Connect to the next address of the head that can be reached."""
        self._disconnect()
        invitation = self.invitation
        while invitation is not None and self._tried:
            address = self._tried.popleft()
            try:
                # ZeroMQ would keep trying forever, without giving a reason.
                socket.create_connection((address, invitation.port), CONNECT_TIMEOUT).close()
            except OSError:
                continue
            self._socket = self._context.socket(zmq.DEALER)
            link.make_client(self._socket, invitation.secret, self._identity)
            self._socket.connect(link.endpoint(address, invitation.port))
            self._since = time.monotonic()
            self._send(
                messages.Hello(
                    protocol=PROTOCOL,
                    host=socket.gethostname(),
                    directory=str(self._directory),
                    version=__version__,
                )
            )
            return

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
        self._socket = None

    def register(self, poller: zmq.Poller) -> None:
        """Let a poller wake when there is something to do."""
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)
        poller.register(self._awake, zmq.POLLIN)

    def began(self, attempt: messages.Began) -> None:
        """Note that ranks of this node began an attempt, at a time of this node's clock."""
        self._began[attempt.restart] = attempt

    # -- messages

    def receive(self) -> None:
        """Handle all messages that have arrived."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._awake, 4096)
        for _ in range(1024):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK) if self._socket else []
            except zmq.Again:
                return
            found = link.unpacked(frames, MESSAGES) if frames else None
            if found is None:
                return
            self._heard = time.monotonic()
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
                self._handle(*found)

    def _handle(self, message: Record, blob: bytes) -> None:
        if isinstance(message, messages.Welcome):
            if message.protocol != PROTOCOL:
                self._disconnect()
                self._refused = True
                return
            self.head = message
            self._taken(message.taken)
            self._asked = set(self._attempts)
            # The connection was lost before the head saw these messages.
            for _, frames in self._pending:
                self._send_frames(frames)
            self._announced = None
            self._relay.joined(HEAD, message.host, self._send)
        elif isinstance(message, messages.Pong):
            self._clock.add(message.sent, message.received, time.time_ns())
        elif isinstance(message, messages.Numbered):
            self._attempts[message.restart] = message.attempt
        elif isinstance(message, messages.Taken):
            self._taken(message.number)
        elif isinstance(message, messages.Request):
            self._request(message.name, blob)
        elif isinstance(message, messages.Question):
            content = opening.loads(blob)
            if self._working < MAX_QUESTIONS:
                self._working += 1
                arguments = (message.number, message.what, content)
                threading.Thread(target=self._work, args=arguments, daemon=True).start()
        elif isinstance(message, messages.EndHang):
            self.hangs = True
        elif isinstance(message, messages.Over):
            self.over = not message.killed
            self._relay.gone(HEAD, "")
            if message.killed:
                self.head = None
                self._disconnect()
        elif isinstance(message, messages.ForDebuggers):
            self._relay.take(HEAD, message, blob)

    def _taken(self, number: int) -> None:
        while self._pending and self._pending[0][0] <= number:
            self._pending.popleft()

    def _request(self, name: str, content: bytes) -> None:
        """Pass a request from the head on to the ranks."""
        if name not in (EXAMINATION, PROFILE, SUSPICION):
            return
        if name == SUSPICION:
            content = moved_suspicion(content, {its: own for own, its in self._attempts.items()})
        with (
            contextlib.suppress(OSError),
            opening.file(self._directory / name, os.O_RDWR, owners=(os.getuid(),)) as file,
        ):
            if os.fstat(file.fileno()).st_size == len(content):
                os.pwrite(file.fileno(), content, 0)
        self._shipment.hurry()
        self._due = time.monotonic() + SHIP_EVERY / 4

    def _work(self, number: int, what: str, arguments: Any) -> None:
        found = None
        with contextlib.suppress(Exception):
            found = self._answer(what, arguments)
        self._answers.put((number, found))
        with contextlib.suppress(OSError):
            os.write(self._wake, b".")

    def _send(self, message: Record, blob: bytes = b"") -> bool:
        return self._send_frames(link.packed(message, blob))

    def _send_frames(self, frames: list[bytes]) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    # -- tasks that are due

    def tick(self) -> None:
        """Perform the tasks that are due: reconnect, ping, send files and answers."""
        now = time.monotonic()
        if self._socket is None:
            return
        if self.head is None and now - self._since > WELCOME_TIMEOUT:
            self._connect()
            return
        if self.head is not None and now - self._heard > LOST_TIMEOUT:
            self.head = None
            self._relay.gone(HEAD, "")
            self._tried = deque(self.invitation.addresses if self.invitation else ())
            self._connect()
            return
        first = len(self._clock) < FIRST_PINGS
        if self.head is not None and now - self._pinged >= (0.02 if first else PING_EVERY):
            self._pinged = now
            self._send(messages.Ping(sent=time.time_ns()))
        best = self._clock.best
        if self.head is None or best is None or first:
            return
        if self._announced is None or abs(best.ahead - self._announced.ahead) > SMALL_CHANGE_NS:
            self._announced = messages.Clock(ahead=best.ahead, error=best.error)
            self._send(self._announced)
        for restart, each in self._began.items():
            if restart not in self._attempts and restart not in self._asked:
                self._asked.add(restart)
                time_there = each.time + best.ahead
                self._send(
                    messages.Began(restart=restart, world_size=each.world_size, time=time_there)
                )
        self._send_answers()
        if now >= self._due and len(self._pending) < MAX_PENDING:
            self._due = now + SHIP_EVERY
            self._ship()

    @property
    def alignment(self) -> Alignment | None:
        """The conversion of this node's files for the head's run directory. None if unknown."""
        if self._announced is None:
            return None
        return Alignment(self._announced.ahead, self._attempts, place_of(self._identity))

    def _ship(self) -> bool:
        """Send new files. Return whether there were any."""
        alignment = self.alignment
        if alignment is None:
            return False
        pieces, contents = self._shipment.collect(alignment)
        if not pieces:
            return False
        self._number += 1
        frames = link.packed(messages.Files(number=self._number, pieces=tuple(pieces)), contents)
        self._pending.append((self._number, frames))
        self._send_frames(frames)
        return True

    def _send_answers(self) -> None:
        alignment = self.alignment
        with contextlib.suppress(Empty):
            while alignment is not None:
                number, found = self._answers.get_nowait()
                self._working -= 1
                self._send(messages.Answer(number=number), dumped(alignment.document(found)))

    @property
    def seconds_to_wait(self) -> float:
        """Seconds until a task is due."""
        return 0.02 if self.head is not None and len(self._clock) < FIRST_PINGS else 0.25

    # -- the end

    def finish(self, status: int | None, seconds: float) -> None:
        """Send the rest once the job's command has ended, unless the head takes too long."""
        deadline = time.monotonic() + seconds
        self._shipment.ended = True
        self._shipment.hurry()
        self._due = 0.0
        left = False
        while self.head is not None and not self.over and time.monotonic() < deadline:
            poller = zmq.Poller()
            self.register(poller)
            poller.poll(50)
            self.receive()
            if self.alignment is None:
                self.tick()
            elif len(self._pending) < MAX_PENDING and not left and not self._ship():
                left = not self._pending
                if left:
                    self._send(messages.Leave(status=status))
                    return
        if not self.over:
            self.head = None

    def close(self) -> None:
        """Close the link."""
        if self._socket is not None:
            self._socket.close(500)
        self._context.term()
        os.close(self._awake)
        os.close(self._wake)
