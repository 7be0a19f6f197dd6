"""The nodes of a job meet at the rendezvous endpoint. All checks across nodes judge that meeting.

The coordinator is node rank 0, or without node ranks the machine that the endpoint names. The
others call it until it is there. Everything has a deadline, and Ctrl-C ends it at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddpdoctor.core.formatting import listed
from ddpdoctor.preflight import situation
from ddpdoctor.preflight.machine.network import interfaces, is_local, is_own_address, resolve
from ddpdoctor.preflight.protocol import coordinator, joining
from ddpdoctor.preflight.protocol.coordinator import Coordinator, Phases
from ddpdoctor.preflight.protocol.joining import Call, CallError, Goal, Kind, Problem
from ddpdoctor.preflight.protocol.messages import Facts, Node, Report
from ddpdoctor.preflight.protocol.pairs import Listener
from ddpdoctor.preflight.protocol.wire import NO_FILES, WireError, key_of, words_of
from ddpdoctor.preflight.protocol.worker import Worker, gather_facts, host_of
from ddpdoctor.preflight.selftest.collectives import Ranks
from ddpdoctor.preflight.situation import NodePlace, Situation, node_place

GATHER_TIMEOUT = 30.0  # Seconds to wait for absent nodes; half of ``--timeout`` at most

LOCAL_TIMEOUT = 10.0
"""The same for an endpoint on localhost, where only nodes of this machine can come."""

POLL_INTERVAL = 0.2
CANCEL_INTERVAL = 1.0  # Seconds after which a task that goes on is cancelled again
SCOUT_INTERVAL = 1.0
OWN_CALLS = 5
NAMED_NODES = 4  # If more nodes are absent, a person who waits is shown their number

ELSEWHERE: frozenset[Kind] = frozenset({"refused", "no host", "silent", "other service"})
"""What node rank 0 sees at an endpoint that does not lead to it. Lost packets prove nothing: many
routers do not let a machine reach itself from outside."""

REDUCING = frozenset({"gloo-nodes", "nccl-nodes"})  # The checks that need ranks with torch


@dataclass(frozen=True)
class Meeting:
    """The result of a meeting. The report is the same on every node.

    Attributes:
        place: This node's place in the job.
        own: The index of this node in ``nodes``; -1 if it is not among them.
        problem: Why this node did not meet the others; None if it did.
        holder: Whether this node should coordinate.
        foreign: The endpoint's addresses, if this is node rank 0 and they are not its own.
        own_endpoint: Whether the endpoint is this machine, and it is not node rank 0.
        report: The coordinator's report.
    """

    place: NodePlace
    own: int = -1
    problem: Problem | None = None
    holder: bool = False
    foreign: tuple[str, ...] = ()
    own_endpoint: bool = False
    report: Report = field(default_factory=Report)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that came, by node rank."""
        return self.report.nodes

    @property
    def expected(self) -> int:
        """How many nodes should come, by the coordinator's options."""
        return self.report.expected

    def host(self, index: int) -> str:
        """Return a node's host name."""
        return self.nodes[index].facts.host

    def name(self, index: int) -> str:
        """Name a node by its host name and its rank."""
        facts = self.nodes[index].facts
        rank = index if facts.rank is None else facts.rank
        return f"{facts.host} (node {rank}{', this one' if index == self.own else ''})"

    def hosts(self, chosen: Sequence[int]) -> str:
        """Name several nodes."""
        return listed([self.name(index) for index in chosen], 4)


def meeting_of(situation: Situation) -> Meeting:
    """Return the meeting. It takes place once, when the first check asks.

    Raises:
        Exception: A defect of this program.
    """
    came = situation.shared(meet_or_fail)
    if isinstance(came, Exception):
        raise came
    return came


def meet_or_fail(situation: Situation) -> Meeting | Exception:
    """Return the meeting, or the defect that ended it, for every check that asks."""
    try:
        # Open what an event loop opens. A loop that finds no files left prints a traceback.
        with contextlib.ExitStack() as opened:
            for end in socket.socketpair():
                opened.enter_context(end)
            opened.enter_context(selectors.DefaultSelector())
        return asyncio.run(_until_cancelled(situation))
    except OSError as error:
        if error.errno not in NO_FILES:
            return error
        return Meeting(node_place(situation), problem=Problem("no files", words=words_of(error)))
    except Exception as error:
        return error


async def _until_cancelled(situation: Situation) -> Meeting:
    said: set[str] = set()

    def fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report once what asyncio would print, such as connections for which no file is left."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in NO_FILES:
            what = "files"
            words = f"{words_of(error)}: not all nodes can connect; raise it with ulimit -n"
        elif "files" in said and isinstance(error, ValueError):
            # Python 3.11 tries to accept again, once for each place in the backlog, even after the
            # server was closed.
            return
        else:
            what = words = f"while the nodes met: {error or context.get('message')!r}"
        if what not in said:
            said.add(what)
            situation.say(words)

    asyncio.get_running_loop().set_exception_handler(fault)
    meeting = asyncio.ensure_future(_meet(situation))
    try:
        while not meeting.done() and situation.deadline.left() > 0:
            await asyncio.wait({meeting}, timeout=POLL_INTERVAL)
    finally:
        if not meeting.done():
            meeting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await meeting
    if meeting.cancelled():
        return Meeting(node_place(situation), problem=Problem("time"))
    return meeting.result()


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait for their end.

    Before Python 3.12, a task that has just got what it waits for misses that it is cancelled.
    """
    pending = {*tasks}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_INTERVAL)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _meet(situation: Situation) -> Meeting:
    began = time.monotonic()
    options = situation.options
    place = node_place(situation)
    listener = Listener()
    ranks = Ranks(situation.environ)
    reduces = situation.chosen is None or bool(situation.chosen & REDUCING)
    try:
        port = await listener.open()
        if reduces:
            await ranks.start(situation.nproc)
        facts = await asyncio.to_thread(gather_facts, situation, place, port, reduces=reduces)
        goal = Goal(place.host, place.port, key_of(place.rdzv_id), host_of(situation), place.rank)
        gather_until = began + min(GATHER_TIMEOUT * options.scale, options.timeout / 2)
        deadline = time.monotonic() + situation.deadline.left()
        node = Participant(situation, place, goal, facts, listener, ranks, gather_until, deadline)
        return await node.meet()
    finally:
        await listener.close()
        await ranks.stop()


@dataclass
class Participant:
    """This node on its way to the others, as the coordinator or as a caller."""

    situation: Situation
    place: NodePlace
    goal: Goal
    facts: Facts
    listener: Listener
    ranks: Ranks
    gather_until: float
    deadline: float

    async def meet(self) -> Meeting:
        """Meet the others in the role that this node has."""
        place = self.place
        if not place.host:
            return Meeting(place, problem=Problem("unresolved"))
        if is_local(place.host):
            self.gather_until = min(self.gather_until, time.monotonic() + LOCAL_TIMEOUT)
        addresses = (await asyncio.to_thread(resolve, place.host)).addresses
        at_home = is_own_address(addresses, self.situation.shared(interfaces))
        if place.rank == 0 or (place.rank is None and at_home):
            return await self._coordinate(at_home, addresses)
        return replace(await self._join(), own_endpoint=at_home)

    async def _coordinate(self, at_home: bool, addresses: tuple[str, ...]) -> Meeting:
        try:
            listening = coordinator.listen(self.place.port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and self.place.rank is None:
                # As with torchrun, another process of this machine holds the store.
                return await self._join()
            if error.errno in NO_FILES:
                raise
            problem = Problem("refused", words=words_of(error))
            if error.errno == errno.EADDRINUSE:
                problem = await self._who_listens(problem)
            return Meeting(self.place, problem=problem, holder=True)
        options = self.situation.options
        here = Coordinator(listening, self.goal.key, self.place.nnodes, options.scale)
        await here.open()
        phases = Phases(
            here, self.place.nnodes, self.place.port, self.deadline, options.scale, options.soak
        )
        lead = asyncio.ensure_future(phases.run(self.gather_until))
        work = asyncio.ensure_future(self._work_here())
        scout = asyncio.ensure_future(self._scout(here, at_home))
        reminder = asyncio.ensure_future(self._say_who_is_missing(here))
        try:
            await asyncio.wait({work, scout, lead}, return_when=asyncio.FIRST_COMPLETED)
            if lead.done():
                # Raise what broke there. It is a defect, and is reported as such.
                lead.result()
            if scout.done() and (call := scout.result()) is not None:
                return await self._work(call)
            foreign = () if at_home else addresses
            return replace(await work, holder=True, foreign=foreign)
        finally:
            await _end(lead, work, scout, reminder)
            await here.close()

    async def _who_listens(self, problem: Problem) -> Problem:
        """Return why the port is taken: it may be another check, even of another job."""
        try:
            call = await self._call_here()
        except CallError as error:
            return error.problem if error.problem.kind == "other id" else problem
        await call.link.close()
        return replace(problem, words=f"{problem.words}: this check runs here already")

    async def _call_here(self) -> Call:
        goal = self.goal
        return await joining.call_once("127.0.0.1", goal.port, goal.key, goal.hostname)

    async def _work_here(self) -> Meeting:
        """Take part like any other node."""
        for _ in range(OWN_CALLS):
            # Callers without the id may hold all places for a moment.
            with contextlib.suppress(CallError):
                return await self._work(await self._call_here())
            await asyncio.sleep(SCOUT_INTERVAL)
        return await self._work(await self._call_here())

    async def _say_who_is_missing(self, here: Coordinator) -> None:
        """Tell a person after a while who is waited for."""
        await asyncio.sleep(joining.SPEAK_AFTER)
        if here.gathering:
            left = max(0.0, self.gather_until - time.monotonic())
            nnodes, known = self.place.nnodes, {member.facts.rank for member in here.members}
            missing = [self.place.name(rank) for rank in range(nnodes) if rank not in known]
            if None in known or len(missing) > NAMED_NODES:
                missing = [f"{nnodes - len(here.members)} more"]
            callers = "" if here.callers else f"; no node has called port {self.place.port} yet"
            self.situation.say(
                f"{len(here.members)} of {nnodes} nodes are here, waiting for "
                f"{', '.join(missing)}{callers}; {left:.0f} s more"
            )

    async def _scout(self, here: Coordinator, at_home: bool) -> Call | None:
        """Return the coordinator to which the endpoint leads; None if that is this node.

        Node rank 0 may be behind a forwarded port, so that the endpoint's address is not its own.
        If it is not, and no node coordinates there, no node will ever come here.
        """
        began = time.monotonic()
        seen: set[Kind] = set()
        # A service of Kubernetes refuses until the container behind it is ready.
        patient = situation.appears_when_started(self.situation)
        while not at_home:
            try:
                call = await joining.call_any(self.goal)
            except CallError as error:
                seen.add(error.problem.kind)
                waited = time.monotonic() - began
                hopeless = seen <= ELSEWHERE and not here.callers and not patient
                if waited > joining.SETTLED_AFTER and hopeless:
                    here.give_up()
            else:
                if call.identity != here.identity:
                    return call
                await call.link.close()
                at_home = True
            await asyncio.sleep(SCOUT_INTERVAL)
        await asyncio.Event().wait()
        return None

    async def _join(self) -> Meeting:
        appears = situation.appears_when_started(self.situation)
        say = self.situation.say
        try:
            call = await joining.join(self.goal, self.gather_until, say, appears=appears)
        except CallError as error:
            return Meeting(self.place, problem=error.problem)
        return await self._work(call)

    async def _work(self, call: Call) -> Meeting:
        """Carry out the coordinator's orders, until it sends its report."""
        own = self.situation.verdicts
        worker = Worker(call, self.place, self.facts, self.listener, self.ranks, own)
        try:
            report = await worker.run(self.deadline)
        except WireError as error:
            return Meeting(self.place, problem=Problem("gone", words=str(error)))
        except CallError as error:
            return Meeting(self.place, problem=error.problem)
        finally:
            await call.link.close()
        return Meeting(self.place, worker.index, report=report)
