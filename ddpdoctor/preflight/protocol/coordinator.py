"""The node at the rendezvous endpoint: gathers the others, and asks them what they find."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddpdoctor.preflight.protocol import admission, connecting, wire
from ddpdoctor.preflight.protocol.addresses import is_loopback
from ddpdoctor.preflight.protocol.joining import side_doors
from ddpdoctor.preflight.protocol.messages import (
    Answer,
    Knock,
    Order,
    Welcome,
)
from ddpdoctor.preflight.protocol.report import (
    Caller,
    Facts,
    unpack,
)
from ddpdoctor.preflight.protocol.validation import unpacked
from ddpdoctor.preflight.protocol.wire import Link, WireError
from ddpdoctor.run.records.base import as_json

KNOCK_LIMIT = 10.0
"""Seconds for a caller to show what it is, and for a node to gather its facts."""

UNPROVED_LIMIT = 60.0
"""Seconds for a proof on a machine that does not get further; see `admission.SECONDS`."""

MOST_CLOCK_QUESTIONS = 64
TOKEN_BYTES = 16
LOOK_EVERY = 0.5
DISAGREEING_WAIT = 3.0
"""Seconds for more nodes after the last one, once it is known that their options differ."""

MOST_STRANGERS = 32
"""Callers with another id that are remembered; all are counted."""

SEGMENT = 536
"""Bytes of payload per packet between the coordinator and the nodes."""


@dataclass
class Member:
    """A node that is here.

    Attributes:
        link: The connection to it.
        facts: What it reports of itself.
        address: Where its connection comes from.
        reached: The address of this machine that it reached.
        offset: How far the coordinator's clock is ahead of the node's, in seconds.
        uncertainty: Half a round trip of that estimate, in seconds.
        lost: In which phase it went away; empty while it is here.
        why: What was seen of that.
    """

    link: Link
    facts: Facts
    address: str
    reached: str
    offset: float
    uncertainty: float
    lost: str = ""
    why: str = ""


class Coordinator:
    """Listens on the rendezvous port, and knows the nodes that came.

    Args:
        listening: Bound to the rendezvous port.
        key: Of :func:`wire.key_of`.
        nnodes: How many nodes are expected.
        scale: How much longer than usual everything may take.
    """

    def __init__(
        self, listening: socket.socket, key: bytes, nnodes: int, scale: float = 1.0
    ) -> None:
        self.identity = wire.nonce()
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.members: list[Member] = []
        self.strangers: list[Caller] = []
        self.uninvited = 0
        """How many calls came without a proof."""
        self.surplus: list[Caller] = []
        self.blocked: list[Caller] = []
        self.callers = False
        """Whether any other machine has called."""
        self._listening = listening
        self._key = key
        self._nnodes = nnodes
        self._scale = scale
        self._admission = admission.Admission()
        self._gathered = asyncio.Event()
        self._complete = asyncio.Event()
        self._given_up = False
        self._came = 0.0
        """When the last one came."""
        self._servers: list[asyncio.Server] = []
        self._watches: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Begin to listen, at a side door as well where one is free."""
        await self._serve(self._listening)
        for door in side_doors(self._key, self._listening.getsockname()[1]):
            with contextlib.suppress(OSError):
                await self._serve(listen(door))
                break

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._arrive, sock=listening, backlog=1024)
        self._servers.append(server)

    @property
    def gathering(self) -> bool:
        """Whether nodes are still waited for."""
        return not self._is_closed()

    async def gather(self, until: float) -> list[Member]:
        """Wait for all nodes, or for the time (monotonic) until which they may come.

        Returns:
            Those that came, ordered by node rank; a node without one comes last.
        """
        while time.monotonic() < until and not self._given_up:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._complete.wait(), LOOK_EVERY)
            numbers = {self._nnodes, *(member.facts.nnodes for member in self.members)}
            if len(numbers) > 1:
                # All have to be started again: it is enough to know who is there.
                here = len(self.members) + len(self.surplus)
                if here >= max(numbers) or time.monotonic() > self._came + DISAGREEING_WAIT:
                    break
                await asyncio.sleep(LOOK_EVERY)
            elif len(self.members) + len(self.blocked) >= self._nnodes:
                # All are here, or do not get through and have said so.
                break
        self._gathered.set()
        # Until a watch has ended it holds the reading side of its connection.
        await asyncio.gather(*self._watches)
        self.members.sort(key=lambda each: (each.facts.rank is None, each.facts.rank or 0))
        return self.members

    def give_up(self) -> None:
        """Wait for no more nodes: the endpoint does not lead here."""
        self._given_up = True

    def free_port(self) -> None:
        """Stop listening; the nodes that are here stay connected."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def close(self) -> None:
        """Stop listening, and let all nodes go."""
        self.free_port()
        for member in self.members:
            await member.link.close()

    async def ask(
        self, orders: Mapping[int, Order], phase: str, seconds: float
    ) -> dict[int, Answer]:
        """Ask several nodes at once.

        Args:
            orders: By the node's index.
            phase: What is being done, should a node go away.
            seconds: Time for the answers.

        Returns:
            The answers that came, by the node's index.
        """
        answers: dict[int, Answer] = {}

        async def one(index: int, order: Order) -> None:
            member = self.members[index]
            if member.lost:
                return
            try:
                await member.link.send(order)
                answer = unpacked(Answer, await member.link.receive(seconds))
            except (WireError, ValueError) as error:
                member.lost, member.why = phase, str(error)
                return
            if answer.failed:
                member.lost, member.why = phase, answer.failed
                return
            answers[index] = answer

        await asyncio.gather(*(one(*each) for each in orders.items()))
        return answers

    async def send_all(self, order: Order, seconds: float) -> None:
        """Send the same to all nodes that are still here, and wait until they have it.

        Where packets are lost it takes a while, and what is not sent when this process ends is lost
        as well: nodes without the report would say that node 0 went away.
        """
        data = wire.packed(order)

        async def one(member: Member) -> None:
            with contextlib.suppress(WireError):
                await member.link.send_packed(data)
                await member.link.receive(seconds)

        await asyncio.gather(*(one(member) for member in self.members if not member.lost))

    async def _arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        member = None
        # A cancellation ends the check, and asyncio would print it.
        with contextlib.suppress(
            WireError, ValueError, OSError, TypeError, TimeoutError, asyncio.CancelledError
        ):
            member = await self._admit(link)
        if member is None:
            await link.close()
            return
        own = Caller(member.facts.host, member.address)
        if self._is_closed():
            # Another one was quicker while this one gathered its facts.
            with contextlib.suppress(WireError):
                await link.send({"do": "leave", **as_json(self._refusal(own))})
            await link.close()
            return
        self.members.append(member)
        self._came = time.monotonic()
        # Whatever it did before, it did it right this time.
        self.blocked = _without(self.blocked, own)
        self.strangers = _without(self.strangers, own)
        if len(self.members) >= self._nnodes:
            self._complete.set()
        self._watches.append(asyncio.ensure_future(self._watch(member)))

    async def _proved(self, link: Link, address: str) -> Knock | None:
        """What a caller says first, if it proves that it knows the rendezvous id."""
        with self._admission.place(link.writer, address) as placed:
            if not placed:
                link.writer.transport.abort()
                return None
            challenge = wire.nonce()
            link.writer.write(wire.greeting(challenge))
            receiving = link.receive(UNPROVED_LIMIT, admission.BYTES)
            message = await admission.in_time(receiving)
            try:
                knock = unpacked(Knock, message)
            except ValueError:
                knock = Knock()
            if wire.proves(knock.proof, self._key, "node", challenge):
                return knock
            self.uninvited += 1
            caller = Caller(knock.host, address)
            self.strangers = [*_without(self.strangers, caller), caller][-MOST_STRANGERS:]
            await admission.in_time(link.send(Welcome(refused="id")))
        return None

    async def _admit(self, link: Link) -> Member | None:
        address = _plain(link.writer.get_extra_info("peername"))
        reached = _plain(link.writer.get_extra_info("sockname"))
        self.callers = self.callers or not is_loopback(address)
        first = await self._proved(link, address)
        if first is None:
            return None
        caller = Caller(first.host, address)
        welcome = self._refusal(caller) if self._is_closed() else Welcome()
        proof = wire.proof(self._key, "coordinator", first.nonce)
        await link.send(replace(welcome, proof=proof, identity=self.identity, reached=reached))
        for _ in range(0 if welcome.refused else MOST_CLOCK_QUESTIONS):
            message = await link.receive(KNOCK_LIMIT * self._scale)
            knock = unpacked(Knock, message)
            if knock.blocked:
                # It came by the side door, because it finds the rendezvous port closed.
                caller = replace(caller, rank=knock.rank, kind=knock.blocked)
                self.blocked = [*_without(self.blocked, caller), caller]
                return None
            if "facts" in message:
                return Member(
                    link,
                    unpack(message["facts"]),
                    address,
                    reached,
                    knock.offset,
                    knock.uncertainty,
                )
            await link.send(Welcome(time=time.time()))
        return None

    def _is_closed(self) -> bool:
        return self._gathered.is_set() or len(self.members) >= self._nnodes

    def _refusal(self, caller: Caller) -> Welcome:
        self.surplus.append(caller)
        self._came = time.monotonic()
        return Welcome(
            refused="late" if len(self.members) < self._nnodes else "full",
            here=tuple(member.facts.host for member in self.members[:32]),
            nnodes=self._nnodes,
        )

    async def _watch(self, member: Member) -> None:
        """Forget a node that goes away before all are here: it may be started again."""
        gone = asyncio.ensure_future(member.link.reader.read(1))
        gathered = asyncio.ensure_future(self._gathered.wait())
        try:
            await asyncio.wait({gone, gathered}, return_when=asyncio.FIRST_COMPLETED)
            if not self._gathered.is_set():
                self.members.remove(member)
                if len(self.members) < self._nnodes:
                    self._complete.clear()
                await member.link.close()
        finally:
            gone.cancel()
            gathered.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await gone


def _without(callers: list[Caller], caller: Caller) -> list[Caller]:
    """The callers from other machines than this one: it may be started again."""
    own = (caller.host, caller.address)
    return [each for each in callers if (each.host, each.address) != own]


def listen(port: int) -> socket.socket:
    """Bind the rendezvous port on all addresses, as torch's store does.

    Raises:
        OSError: It is taken, or not allowed.
    """
    listening = connecting.listen(port)
    with contextlib.suppress(OSError):
        # Small packets: reports about a link that loses large ones have to arrive.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
    return listening


def _plain(name: Any) -> str:
    """The address of a socket's end, without the IPv6 form of IPv4, and without a zone."""
    return str(name[0]).removeprefix("::ffff:").partition("%")[0]
