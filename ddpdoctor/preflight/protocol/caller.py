"""A call to the coordinator: connect, prove the id, compare clocks; or know why not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Literal

from ddpdoctor.preflight.protocol import admission, wire
from ddpdoctor.preflight.protocol.connecting import Closed, ConnectError, connect
from ddpdoctor.preflight.protocol.messages import (
    Knock,
    Welcome,
)
from ddpdoctor.preflight.protocol.validation import unpacked
from ddpdoctor.preflight.protocol.wire import Link, WireError

GREETING_LIMIT = 3.0
CLOCK_QUESTIONS = 8

Kind = Literal[
    Closed,
    "unresolved",  # the endpoint's name is not known here
    "silent",  # connected, but nothing was said
    "other service",  # connected to something that is no check
    "other id",  # a check with another rendezvous id, most likely of another job
    "late",  # a check that went on without this node
    "full",  # a check that has all its nodes
    "gone",  # the connection was lost
    "time",  # the check's own time was over in the middle
]

FINAL: frozenset[Kind] = frozenset({"other id", "late", "full"})
"""What trying again does not change."""


@dataclass(frozen=True)
class Problem:
    """Why a node is not connected to the coordinator.

    Attributes:
        address: Which address of the endpoint it is about; empty if there is none.
        words: More, for a person: the kernel's words, or who is there already.
        sender: Who rejects it by ICMP; empty if that is not so.
        answering: A port at which that machine does answer; 0 if none is known.
        echoes: Whether it answers a ping.
        here: The host names of those that are there already.
        door: The other port at which the coordinator itself answers; 0 if it does not.
        behind: The coordinator's own address, where that is not the one that was dialled.
        waited: Seconds until this was settled.
    """

    kind: Kind
    address: str = ""
    words: str = ""
    sender: str = ""
    answering: int = 0
    echoes: bool = False
    here: tuple[str, ...] = ()
    door: int = 0
    behind: str = ""
    waited: float = 0.0


class CallError(Exception):
    """The coordinator was not reached."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.kind)
        self.problem = problem


@dataclass
class Call:
    """A connection to the coordinator.

    Attributes:
        identity: Which coordinator it is.
        offset: What the coordinator's clock is ahead, in seconds.
        uncertainty: Half the round trip of that estimate, in seconds.
        address: Where it was called.
        reached: Where the call ended: another address if one is translated on the way.
    """

    link: Link
    identity: str
    offset: float
    uncertainty: float
    address: str = ""
    reached: str = ""


async def call_once(address: str, port: int, key: bytes, hostname: str) -> Call:
    """One attempt to reach the coordinator at an address and port of the endpoint.

    Args:
        address: Of the endpoint.
        port: Of the endpoint.
        key: Of :func:`wire.key_of`.
        hostname: This node's.

    Raises:
        CallError: It failed.
    """
    try:
        reader, writer = await connect(address, port)
    except ConnectError as error:
        raise CallError(Problem(error.kind, address, error.words, error.sender)) from None
    link = Link(reader, writer)
    try:
        return await _introduce(link, address, key, hostname)
    except BaseException as error:
        await link.close()
        if isinstance(error, WireError):
            raise CallError(Problem("gone", address, str(error))) from None
        raise


async def _introduce(link: Link, address: str, key: bytes, hostname: str) -> Call:
    try:
        line = await asyncio.wait_for(link.reader.readexactly(wire.GREETING_BYTES), GREETING_LIMIT)
        challenge = wire.challenge_in(line)
    except asyncio.TimeoutError:
        raise CallError(Problem("silent", address)) from None
    except (OSError, asyncio.IncompleteReadError):
        challenge = None
    if challenge is None:
        raise CallError(Problem("other service", address))
    own = wire.nonce()
    await link.send(Knock(wire.proof(key, "node", challenge), own, hostname))
    welcome = await _answer(link)
    if welcome.refused == "id":
        raise CallError(Problem("other id", address))
    if not wire.proves(welcome.proof, key, "coordinator", own):
        raise CallError(Problem("other service", address))
    if welcome.refused:
        raise refused(welcome, address)
    # How far the coordinator's clock is ahead, by the fastest of several questions, as in NTP.
    uncertainty, offset = float("inf"), 0.0
    for _ in range(CLOCK_QUESTIONS):
        wall, began = time.time(), time.monotonic()
        await link.send(Knock())
        answer = await _answer(link)
        half = (time.monotonic() - began) / 2
        if half < uncertainty:
            uncertainty, offset = half, answer.time - (wall + half)
    return Call(link, welcome.identity, offset, uncertainty, address, welcome.reached)


async def _answer(link: Link) -> Welcome:
    message = await link.receive(GREETING_LIMIT, admission.BYTES)
    try:
        return unpacked(Welcome, message)
    except ValueError as error:
        raise WireError(str(error)) from None


def refused(welcome: Welcome, address: str = "") -> CallError:
    """That the coordinator goes on without this node."""
    here = welcome.here
    words = f"{len(here)} of {welcome.nnodes} nodes are there: {', '.join(here)}"
    kind: Kind = "full" if welcome.refused == "full" else "late"
    return CallError(Problem(kind, address, words, here=here))
