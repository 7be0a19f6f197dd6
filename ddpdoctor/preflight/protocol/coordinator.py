"""The node at the rendezvous endpoint: gathers the others, leads them through the tests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpdoctor.preflight.protocol import connecting, wire
from ddpdoctor.preflight.protocol.addresses import is_loopback
from ddpdoctor.preflight.protocol.facts import Facts, unpack
from ddpdoctor.preflight.protocol.joining import side_doors
from ddpdoctor.preflight.protocol.wire import Link, WireError

KNOCK_LIMIT = 10.0
"""Seconds for a caller to show what it is, and for a node to gather its facts."""

MOST_CLOCK_QUESTIONS = 64
TOKEN_BYTES = 16
LOOK_EVERY = 0.5
DISAGREEING_WAIT = 3.0
"""Seconds for more nodes after the last one, once it is known that not all were told the same."""

STRANGERS_WAIT = 3.0
"""Seconds for more nodes, once those that are missing were here with another id."""

SEGMENT = 536
"""Bytes of payload per packet between the coordinator and the nodes."""


@dataclass
class Member:
    """A node that is here.

    Attributes:
        link: The connection to it.
        facts: What it told of itself.
        address: Where its connection comes from.
        reached: The address of this machine that it reached.
        offset: What the coordinator's clock is ahead of its own, in seconds.
        uncertainty: Half a round trip of that estimate, in seconds.
        lost: In which phase it went away; empty while it is here.
    """

    link: Link
    facts: Facts
    address: str
    reached: str
    offset: float
    uncertainty: float
    lost: str = ""


class Coordinator:
    """Listens on the rendezvous port, and knows the nodes that came.

    Args:
        listening: Bound to the rendezvous port.
        key: Of :func:`wire.key_of`.
        nnodes: How many nodes are expected.
    """

    def __init__(self, listening: socket.socket, key: bytes, nnodes: int) -> None:
        self.identity = wire.nonce()
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.members: list[Member] = []
        self.strangers: list[dict[str, Any]] = []
        self.surplus: list[dict[str, Any]] = []
        self.blocked: list[dict[str, Any]] = []
        self.callers = False
        """Whether anybody but this machine has called."""
        self._listening = listening
        self._key = key
        self._nnodes = nnodes
        self._gathered = asyncio.Event()
        self._complete = asyncio.Event()
        self._given_up = False
        self._came = 0.0
        """When the last one came."""
        self._servers: list[asyncio.Server] = []
        self._watches: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Begin to listen, at a side door as well where one is free."""
        port = self._listening.getsockname()[1]
        await self._serve(self._listening)
        for door in side_doors(self._key, port):
            try:
                listening = listen(door)
            except OSError:
                continue
            await self._serve(listening)
            break

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._arrive, sock=listening, backlog=1024)
        self._servers.append(server)

    @property
    def gathering(self) -> bool:
        """Whether nodes are still waited for."""
        return not self._gathered.is_set() and len(self.members) < self._nnodes

    async def gather(self, until: float) -> list[Member]:
        """Wait for all nodes, or for the time (monotonic) until which they may come.

        Returns:
            Those that came, ordered by node rank; a node without one comes last.
        """
        while time.monotonic() < self._limit(until) and not self._given_up:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._complete.wait(), LOOK_EVERY)
            numbers = {self._nnodes, *(member.facts.nnodes for member in self.members)}
            if len(numbers) > 1:
                # All have to be started anew: it is enough to know who is there.
                here = len(self.members) + len(self.surplus)
                if here >= max(numbers) or time.monotonic() > self._came + DISAGREEING_WAIT:
                    break
                await asyncio.sleep(LOOK_EVERY)
                continue
            if len(self.members) + len(self.blocked) >= self._nnodes:
                # All are here, or do not get through and have said so.
                break
        self._gathered.set()
        # Until a watch has ended it holds the reading side of its connection.
        await asyncio.gather(*self._watches)
        order = [
            (member.facts.rank is None, member.facts.rank or 0, place)
            for place, member in enumerate(self.members)
        ]
        self.members = [self.members[place] for _, _, place in sorted(order)]
        return self.members

    def _limit(self, until: float) -> float:
        """Until when nodes are waited for, as it is known now."""
        known = len(self.members) + len(self.blocked)
        if self.strangers and known + len(self.strangers) >= self._nnodes:
            # The missing ones were here, with another id: they hardly come again.
            last: float = self.strangers[-1]["at"]
            return min(until, last + STRANGERS_WAIT)
        return until

    def give_up(self) -> None:
        """Wait for nobody else: the endpoint does not lead here."""
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
        self, questions: Mapping[int, Mapping[str, Any]], phase: str, seconds: float
    ) -> dict[int, dict[str, Any]]:
        """Ask several nodes at once.

        Args:
            questions: By the node's index.
            phase: What is being done, should a node go away.
            seconds: Time for the answers.

        Returns:
            The answers that came, by the node's index.
        """
        answers: dict[int, dict[str, Any]] = {}

        async def one(index: int, question: Mapping[str, Any]) -> None:
            member = self.members[index]
            if member.lost:
                return
            try:
                await member.link.send(question)
                answers[index] = await member.link.receive(seconds)
            except WireError:
                member.lost = phase

        await asyncio.gather(*(one(*each) for each in questions.items()))
        return answers

    async def tell(self, message: Mapping[str, Any]) -> None:
        """Tell all nodes that are still here."""
        data = wire.packed(message)

        async def one(member: Member) -> None:
            with contextlib.suppress(WireError):
                await member.link.send_packed(data)

        await asyncio.gather(*(one(member) for member in self.members if not member.lost))

    def present(self) -> list[int]:
        """The indices of the nodes that are still here."""
        return [place for place, member in enumerate(self.members) if not member.lost]

    async def _arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        try:
            member = await self._admit(link)
        except asyncio.CancelledError:
            # The check is over; asyncio would print it.
            member = None
        except (WireError, ValueError, OSError, KeyError, TypeError, OverflowError):
            member = None
        if member is not None and self._is_closed():
            # Another one was quicker while this one told its facts.
            with contextlib.suppress(WireError):
                refusal = self._refusal({"host": member.facts.host, "address": member.address})
                await link.send({"do": "leave", **refusal})
            member = None
        if member is None:
            await link.close()
            return
        self.members.append(member)
        self._came = time.monotonic()
        own = {"host": member.facts.host, "address": member.address}
        # Whatever it did before, it did it right this time.
        self.blocked = [each for each in self.blocked if not _is_same(each, own)]
        self.strangers = [each for each in self.strangers if not _is_same(each, own)]
        if len(self.members) >= self._nnodes:
            self._complete.set()
        self._watches.append(asyncio.ensure_future(self._watch(member)))

    async def _admit(self, link: Link) -> Member | None:
        challenge = wire.nonce()
        link.writer.write(wire.greeting(challenge))
        knock = await link.receive(KNOCK_LIMIT)
        address = _plain(link.writer.get_extra_info("peername")[0])
        self.callers = self.callers or not is_loopback(address)
        caller = {"host": str(knock.get("host"))[:255], "address": address}
        if not wire.proves(knock.get("proof"), self._key, "node", challenge):
            told = {**caller, "at": time.monotonic()}
            self.strangers = [each for each in self.strangers if not _is_same(each, told)]
            self.strangers.append(told)
            await link.send({"refused": "id"})
            return None
        welcome = {
            "proof": wire.proof(self._key, "coordinator", str(knock["nonce"])),
            "identity": self.identity,
        }
        if self._is_closed():
            await link.send({**welcome, **self._refusal(caller)})
            return None
        await link.send(welcome)
        for _ in range(MOST_CLOCK_QUESTIONS):
            message = await link.receive(KNOCK_LIMIT)
            if "blocked" in message:
                self._note_blocked(caller, message)
                return None
            if "facts" in message:
                return Member(
                    link,
                    unpack(message["facts"]),
                    address,
                    _plain(link.writer.get_extra_info("sockname")[0]),
                    float(message["offset"]),
                    float(message["uncertainty"]),
                )
            await link.send({"time": time.time()})
        return None

    def _note_blocked(self, caller: dict[str, Any], message: Mapping[str, Any]) -> None:
        """A node that came by the side door, because it finds the rendezvous port closed."""
        rank = message.get("rank")
        rank = rank if isinstance(rank, int) else None
        told = {**caller, "rank": rank, "kind": str(message["blocked"]), "at": time.monotonic()}
        # It may be started again.
        self.blocked = [each for each in self.blocked if not _is_same(each, told)]
        self.blocked.append(told)

    def _is_closed(self) -> bool:
        return self._gathered.is_set() or len(self.members) >= self._nnodes

    def _refusal(self, caller: dict[str, Any]) -> dict[str, Any]:
        self.surplus.append(caller)
        self._came = time.monotonic()
        return {
            "refused": "late" if len(self.members) < self._nnodes else "full",
            "here": [member.facts.host for member in self.members[:32]],
            "nnodes": self._nnodes,
        }

    async def _watch(self, member: Member) -> None:
        """Forget a node that goes away before all are here: it may be started anew."""
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


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two callers are one machine."""
    return bool(one["host"] == other["host"] and one["address"] == other["address"])


def listen(port: int) -> socket.socket:
    """Bind the rendezvous port on all addresses, as torch's store does.

    Raises:
        OSError: It is taken, or not allowed.
    """
    listening = connecting.listen(port)
    with contextlib.suppress(OSError):
        # Small packets: what the nodes report about a way that loses large ones has to arrive.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
    return listening


def packed_token(token: bytes) -> str:
    """A token for a message."""
    return base64.b16encode(token).decode()


def unpacked_token(text: str) -> bytes:
    """A token from a message."""
    return base64.b16decode(text)


def _plain(address: str) -> str:
    """An address without the IPv6 form of IPv4, and without a zone."""
    return str(address).removeprefix("::ffff:").partition("%")[0]
