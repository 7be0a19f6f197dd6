"""The nodes of a job meet at the rendezvous endpoint; all checks across nodes go by that meeting.

Node rank 0, or without node ranks the machine that the endpoint names, coordinates. The others call
it until it is there. Everything has a deadline, and Ctrl-C ends all of it at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpdoctor.preflight.machine import container
from ddpdoctor.preflight.machine.interfaces import interfaces
from ddpdoctor.preflight.machine.lookups import lookup
from ddpdoctor.preflight.place import Seat, seat
from ddpdoctor.preflight.protocol import caller, coordinator, wire
from ddpdoctor.preflight.protocol.addresses import is_local, mine
from ddpdoctor.preflight.protocol.caller import Call, CallError, Kind, Problem
from ddpdoctor.preflight.protocol.coordinator import Coordinator
from ddpdoctor.preflight.protocol.facts import Facts, gather, unpack
from ddpdoctor.preflight.protocol.joining import SETTLED_AFTER, SPEAK_AFTER, Goal, call_any, join
from ddpdoctor.preflight.protocol.pairs import Listener
from ddpdoctor.preflight.protocol.phases import Lead
from ddpdoctor.preflight.protocol.ranks import Ranks
from ddpdoctor.preflight.protocol.wire import WireError
from ddpdoctor.preflight.protocol.worker import Attendance
from ddpdoctor.preflight.situation import Situation

GATHER_LIMIT = 30.0
"""Most seconds to wait for nodes that are not there; half of ``--timeout`` at most."""

LOCAL_LIMIT = 10.0
"""The same for an endpoint on localhost: only nodes of this very machine can come there."""

CANCEL_LATENCY = 0.2
SCOUT_EVERY = 1.0
SAID_NODES = 4
"""Of more absent nodes the number is told while they are waited for."""

ELSEWHERE: frozenset[Kind] = frozenset({"refused", "nobody", "silent", "other service"})
"""What node rank 0 sees at an endpoint that does not lead to it. Lost packets prove nothing: many a
router does not let a machine reach itself from outside."""

REDUCING = frozenset({"gloo-nodes", "nccl-nodes"})
"""The checks that need ranks with torch."""


@dataclass(frozen=True)
class Node:
    """A node that came.

    Attributes:
        facts: What it told of itself.
        address: Where it came from.
        offset: What the coordinator's clock is ahead of its own, in seconds.
        uncertainty: How far that may be off, in seconds.
        lost: In which phase it went away; empty if it stayed.
    """

    facts: Facts
    address: str
    offset: float
    uncertainty: float
    lost: str


@dataclass(frozen=True)
class Meeting:
    """What came of it, the same on every node except for the first three.

    Attributes:
        seat: This node's place.
        own: The index of this node in ``nodes``; -1 if it was not among them.
        problem: Why this node did not come together with the others; None if it did.
        holder: Whether this node was to coordinate.
        foreign: The endpoint's addresses, if this node has node rank 0 and they are not its own.
        expected: How many nodes were to come, as the coordinator was told.
        nodes: Those that came, by node rank.
        blob: The rest of what the coordinator told.
    """

    seat: Seat
    own: int = -1
    problem: Problem | None = None
    holder: bool = False
    foreign: tuple[str, ...] = ()
    expected: int = 0
    nodes: tuple[Node, ...] = ()
    blob: Mapping[str, Any] = field(default_factory=dict)

    def name(self, index: int) -> str:
        """A node for a person: its host name, and its rank where host names are not enough."""
        facts = self.nodes[index].facts
        rank = index if facts.rank is None else facts.rank
        return f"{facts.host} (node {rank}{', this one' if index == self.own else ''})"

    def hosts(self, chosen: list[int]) -> str:
        """Several nodes for a person."""
        names = [self.name(index) for index in chosen[:4]]
        more = f" and {len(chosen) - 4} more" if len(chosen) > 4 else ""
        return ", ".join(names) + more


def meeting_of(situation: Situation) -> Meeting:
    """The meeting of this check, which takes place once, for whoever asks first.

    Raises:
        Exception: A fault of the check itself.
    """
    came = situation.shared(_meet_or_fail)
    if isinstance(came, Exception):
        raise came
    return came


def _meet_or_fail(situation: Situation) -> Meeting | Exception:
    try:
        return asyncio.run(_until_cancelled(situation))
    except Exception as error:  # for every check that asks, not for the first alone
        return error


async def _until_cancelled(situation: Situation) -> Meeting:
    meeting = asyncio.ensure_future(_meet(situation))
    try:
        while not meeting.done():
            await asyncio.wait({meeting}, timeout=CANCEL_LATENCY)
            if situation.deadline.left() <= 0:
                break
    finally:
        if not meeting.done():
            meeting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await meeting
    if meeting.cancelled():
        return Meeting(seat(situation), problem=Problem("time"))
    return meeting.result()


async def _meet(situation: Situation) -> Meeting:
    began = time.monotonic()
    deadline = began + situation.deadline.left()
    gather_until = began + min(GATHER_LIMIT, situation.options.timeout / 2)
    own_seat = seat(situation)
    listener = Listener()
    ranks = Ranks(situation.environ)
    reduces = wants_reduction(situation)
    try:
        port = await listener.open()
        if reduces:
            await ranks.start(situation.nproc)
        facts = await asyncio.to_thread(gather, situation, own_seat, port, reduces=reduces)
        party = Party(situation, own_seat, facts, listener, ranks, gather_until, deadline)
        return await party.meet()
    finally:
        await listener.close()
        await ranks.stop()


def wants_reduction(situation: Situation) -> bool:
    """Whether the collective test is among the checks that run."""
    chosen = situation.chosen
    return chosen is None or bool(chosen & REDUCING)


class Party:
    """This node on its way to the others: as the coordinator, or as a caller."""

    def __init__(
        self,
        situation: Situation,
        seat: Seat,
        facts: Facts,
        listener: Listener,
        ranks: Ranks,
        gather_until: float,
        deadline: float,
    ) -> None:
        self.situation = situation
        self.seat = seat
        self.facts = facts
        self.listener = listener
        self.ranks = ranks
        self.gather_until = gather_until
        self.deadline = deadline
        self.key = wire.key_of(seat.rdzv_id)
        self.goal = Goal(seat.host, seat.port, self.key, situation.hostname, seat.rank)

    async def meet(self) -> Meeting:
        """Meet the others in the role that this node has."""
        if not self.seat.host:
            return Meeting(self.seat, problem=Problem("unresolved"))
        if is_local(self.seat.host):
            self.gather_until = min(self.gather_until, time.monotonic() + LOCAL_LIMIT)
        found = await asyncio.to_thread(lookup, self.seat.host)
        addresses = found.addresses
        at_home = mine(addresses, self.situation.shared(interfaces))
        if self.seat.rank == 0 or (self.seat.rank is None and at_home):
            return await self._coordinate(at_home, addresses)
        return await self._join()

    async def _coordinate(self, at_home: bool, addresses: tuple[str, ...]) -> Meeting:
        try:
            listening = coordinator.listen(self.seat.port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and self.seat.rank is None:
                # As torchrun does: another process of this machine holds the store.
                return await self._join()
            words = os.strerror(error.errno) if error.errno else str(error)
            return Meeting(self.seat, problem=Problem("refused", words=words), holder=True)
        here = Coordinator(listening, self.key, self.seat.nnodes)
        await here.open()
        lead = asyncio.ensure_future(Lead(here, self.seat, self.deadline).run(self.gather_until))
        attend = asyncio.ensure_future(self._attend_own())
        scout = asyncio.ensure_future(self._scout(here, at_home))
        speaker = asyncio.ensure_future(self._say_who_is_missing(here))
        try:
            await asyncio.wait({attend, scout, lead}, return_when=asyncio.FIRST_COMPLETED)
            if lead.done():
                # Whatever broke there is a fault of the check, to be told as such.
                lead.result()
            if scout.done() and (call := scout.result()) is not None:
                return await self._attend(call)
            meeting = await attend
            foreign = () if at_home else addresses
            return Meeting(**{**vars(meeting), "holder": True, "foreign": foreign})
        finally:
            for task in (lead, attend, scout, speaker):
                task.cancel()
            await asyncio.gather(lead, attend, scout, speaker, return_exceptions=True)
            await here.close()

    async def _attend_own(self) -> Meeting:
        call = await caller.call_once(
            "127.0.0.1", self.seat.port, self.key, self.situation.hostname
        )
        return await self._attend(call)

    async def _say_who_is_missing(self, here: Coordinator) -> None:
        """Who waits for others is told after a while that it does, and for whom."""
        await asyncio.sleep(SPEAK_AFTER)
        if here.gathering:
            left = max(0.0, self.gather_until - time.monotonic())
            known = {member.facts.rank for member in here.members}
            missing = [
                self.seat.name(rank) for rank in range(self.seat.nnodes) if rank not in known
            ]
            if None in known or len(missing) > SAID_NODES:
                missing = [f"{self.seat.nnodes - len(here.members)} more"]
            callers = "" if here.callers else f"; no node has called port {self.seat.port} yet"
            self.situation.say(
                f"{len(here.members)} of {self.seat.nnodes} nodes are here, waiting for "
                f"{', '.join(missing)}{callers}; {left:.0f} s more"
            )

    async def _scout(self, here: Coordinator, at_home: bool) -> Call | None:
        """Look whether another node coordinates where the endpoint leads; None if it is this one.

        Node rank 0 may be behind a forwarded port, so that the endpoint's address is not its own.
        If that is not so, and nobody coordinates there, no node will ever come here.
        """
        began = time.monotonic()
        seen: set[Kind] = set()
        # A service of Kubernetes refuses until the container behind it counts as ready.
        patient = container.appears_when_started(self.situation)
        while not at_home:
            try:
                call = await call_any(self.goal)
            except CallError as error:
                seen.add(error.problem.kind)
                waited = time.monotonic() - began
                hopeless = seen <= ELSEWHERE and not here.callers and not patient
                if waited > SETTLED_AFTER and hopeless:
                    here.give_up()
            else:
                if call.identity != here.identity:
                    return call
                await call.link.close()
                at_home = True
            await asyncio.sleep(SCOUT_EVERY)
        await asyncio.Event().wait()
        return None

    async def _join(self) -> Meeting:
        try:
            appears = container.appears_when_started(self.situation)
            say = self.situation.say
            call = await join(self.goal, self.gather_until, say, appears=appears)
        except CallError as error:
            return Meeting(self.seat, problem=error.problem)
        return await self._attend(call)

    async def _attend(self, call: Call) -> Meeting:
        attendance = Attendance(call, self.seat, self.facts, self.listener, self.ranks)
        try:
            blob = await attendance.run(self.deadline)
        except WireError as error:
            return Meeting(self.seat, problem=Problem("gone", words=str(error)))
        except CallError as error:
            return Meeting(self.seat, problem=error.problem)
        finally:
            await call.link.close()
        nodes = tuple(
            Node(
                unpack(told["facts"]),
                str(told["address"]),
                float(told["offset"]),
                float(told["uncertainty"]),
                str(told["lost"]),
            )
            for told in blob.pop("nodes")
        )
        return Meeting(
            self.seat,
            own=attendance.index,
            expected=int(blob.pop("expected")),
            nodes=nodes,
            blob=blob,
        )
