"""The nodes of a job meet at the rendezvous endpoint. All checks across nodes judge that meeting.

The coordinator is node rank 0, or without node ranks the machine that the endpoint names. The
others call it until it answers. Everything has a deadline, and Ctrl-C ends it at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import resource
import selectors
import socket
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.finding import Severity
from ddpdoctor.core.formatting import listed
from ddpdoctor.preflight import situation
from ddpdoctor.preflight.check import Outcome, Status
from ddpdoctor.preflight.machine import network
from ddpdoctor.preflight.machine.network import interfaces, is_local, is_own_address, resolve
from ddpdoctor.preflight.machine.own_address import shared_address
from ddpdoctor.preflight.protocol import coordinator, joining, pairs, wire
from ddpdoctor.preflight.protocol.coordinator import Coordinator, Phases
from ddpdoctor.preflight.protocol.facts import gather_facts, host_of
from ddpdoctor.preflight.protocol.joining import Call, CallError, Goal, Kind, Problem, refused
from ddpdoctor.preflight.protocol.messages import (
    Answer,
    Facts,
    Hello,
    Node,
    Order,
    Report,
    Said,
    Verdict,
    Welcome,
)
from ddpdoctor.preflight.protocol.pairs import STARVED_SHARE, Dialled, Listener, Target
from ddpdoctor.preflight.protocol.wire import NO_FILES, ProcessClock, WireError, key_of, words_of
from ddpdoctor.preflight.selftest.collectives import Ranks
from ddpdoctor.preflight.situation import Deadline, NodePlace, Situation, Verdicts, node_place
from ddpdoctor.run.records.base import as_json

# -- orders


MAX_FINDINGS, MAX_SAID = 16, 500
"""Maximum findings of a machine that are shown on others, and maximum characters of each."""

NAMES, OTHERS = "looking up names", "waiting for the other nodes"

STAGES = {
    "resolve": NAMES,
    "dial": "connecting to the other nodes",
    "settle": "importing torch",
    "speed": "measuring links",
    "folder": "looking into the checkpoint directory",
    "reduce": "reducing",
    "verdict": "the checks of this machine",
}
"""Descriptions of the stages, by order."""

POLL_INTERVAL = 0.2  # Seconds between checks that the coordinator is still there


class Stages:
    """How long each stage of the meeting took on this node, in seconds."""

    def __init__(self) -> None:
        self.took: dict[str, float] = {}
        self._stage, self._began = "", time.monotonic()

    def begin(self, stage: str) -> None:
        """End the current stage, and begin another one."""
        now = time.monotonic()
        if self._stage:
            self.took[self._stage] = self.took.get(self._stage, 0.0) + now - self._began
        self._stage, self._began = stage, now


@dataclass
class Worker:
    """A node that carries out the coordinator's orders."""

    call: Call
    place: NodePlace
    facts: Facts
    listener: Listener
    ranks: Ranks
    verdicts: Verdicts = field(default_factory=Verdicts)
    index: int = -1  # This node's index; -1 until it is known
    master: str = ""
    """The address at which the ranks find the first one, if that is not the endpoint."""
    written: str = ""
    """The token of the file that this node has written into the checkpoint directory."""
    stages: Stages = field(default_factory=Stages)

    async def run(self, deadline: float) -> Report:
        """Carry out orders until the coordinator sends its report, or until the monotonic deadline.

        Raises:
            WireError: The coordinator is gone.
            CallError: The coordinator goes on without this node.
        """
        link, call = self.call.link, self.call
        hello = Hello(called=call.address, offset=call.offset, uncertainty=call.uncertainty)
        await link.send({**as_json(hello), "facts": self.facts})
        try:
            while True:
                left = max(0.1, deadline - time.monotonic())
                message = await link.receive(left, wire.MAX_OF_COORDINATOR)
                order = wire.unpacked(Order, message)
                if order.do == "leave":
                    raise refused(wire.unpacked(Welcome, message))
                if order.do == "end" and order.report is not None:
                    with contextlib.suppress(wire.WireError):
                        await link.send(Answer())
                    return order.report
                try:
                    self.stages.begin(STAGES.get(order.do, OTHERS))
                    answer = await self._while_connected(self._do(order))
                    self.stages.begin(OTHERS)
                except OSError as error:
                    # Too many open files, for example. Node 0 reports it to all.
                    answer = Answer(failed=_error_words(error))
                await link.send(answer)
        except ValueError as error:
            raise wire.WireError(str(error)) from None
        finally:
            # A fake node 0 may never ask to remove it.
            if self.written:
                remove_marker(Path(self.facts.folder), self.written)

    async def _while_connected(self, doing: Coroutine[Any, Any, Answer]) -> Answer:
        """Run a coroutine, and cancel it once the coordinator is gone: ranks would wait forever.

        Raises:
            WireError: The coordinator is gone.
        """
        task = asyncio.ensure_future(doing)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_INTERVAL)
                # Nothing is read: the coordinator sends nothing until it has its answer.
                if not task.done() and self.call.link.reader.at_eof():
                    raise wire.WireError("the connection was closed")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _do(self, order: Order) -> Answer:
        if order.do == "roster":
            self.index = order.index
            self.listener.admit(order.index, pairs.pair_token(order.token.encode()))
        elif order.do == "resolve":
            found = await asyncio.to_thread(resolve, order.host)
            allowed = [each for each in found.addresses if self._may_be_node(each)]
            self.master = next(iter(allowed), "")
            return Answer(addresses=found.addresses[:16], error=found.problem)
        elif order.do == "dial":
            return Answer(dialled=await self._dial(order.targets))
        elif order.do == "verdict":
            until = time.monotonic() + order.limit
            while self.verdicts.so_far()[1] and time.monotonic() < until:
                await asyncio.sleep(POLL_INTERVAL)
            return Answer(verdict=verdict_of(*self.verdicts.so_far()))
        elif order.do == "settle" and order.needed:
            return Answer(unready=await self.ranks.ready(Deadline(order.limit)))
        elif order.do == "settle":
            self.ranks.stop()
        elif order.do == "speed" and order.targets and self._allows(order.targets[0]):
            return Answer(speed=await pairs.dial_speed(order.targets[0], self.listener.token))
        elif order.do == "folder" and self.facts.folder:
            return await asyncio.to_thread(self._in_folder, Path(self.facts.folder), order)
        elif order.do == "reduce":
            # A rank whose peers never come ends at its own limits. `patience` is for hung ranks.
            results = await self.ranks.reduce(self._for_ranks(order), Deadline(order.patience))
            return Answer(ranks=tuple(results))
        return Answer()

    async def _dial(self, targets: Sequence[Target]) -> tuple[Dialled, ...]:
        allowed = [each for each in targets if self._allows(each)]
        results = iter(await pairs.dial_all(allowed, self.listener.token))
        not_dialled = Dialled("unreachable", error="no address of another node: not dialled")
        return tuple(next(results) if self._allows(each) else not_dialled for each in targets)

    def _for_ranks(self, order: Order) -> dict[str, Any]:
        same = ("port", "world", "first", "limit", "stage_limit", "patience", "node_of", "soak")
        return {
            "backend": "gloo",
            "tests": ["all_reduce", "broadcast"],
            "measure": True,
            "host": self.master or self.place.host,
            "ranks": self.facts.nproc,
            "stages": "nccl" if order.nccl else "",
            **{name: getattr(order, name) for name in same},
        }

    def _allows(self, target: Target) -> bool:
        return target.port >= 1024 and self._may_be_node(target.address)

    def _may_be_node(self, address: str) -> bool:
        """Return whether an address may be another node's. A fake node 0 may name any address."""
        return network.may_be_node(address, self.call.address)

    def _in_folder(self, folder: Path, order: Order) -> Answer:
        """Test whether all nodes see a file that one of them writes."""
        if order.action == "write" and not self.written:
            try:
                with open(folder / f"{MARKER_PREFIX}{order.token}", "x") as file:
                    file.write(order.token)
            except OSError as error:
                return Answer(error=error.strerror or str(error))
            self.written = order.token
            return Answer()
        if order.action == "remove":
            remove_marker(folder, self.written)
            self.written = ""
            return Answer()
        return Answer(seen=marker_seen(folder, order.token), listing=folder_hash(folder))


def verdict_of(outcomes: Iterable[Outcome], running: Sequence[str]) -> Verdict:
    """Summarize the outcomes of this machine's checks for the other nodes."""
    said = [(each.check, finding) for each in outcomes for finding in each.findings]
    said = [each for each in said if each[1].severity > Severity.INFO]
    said.sort(key=lambda each: -each[1].severity)
    late = [each.check for each in outcomes if each.status is Status.COULD_NOT_RUN]
    return Verdict(
        tuple(
            Said(check, finding.code, finding.severity.label, finding.message[:MAX_SAID])
            for check, finding in said[:MAX_FINDINGS]
        ),
        (*late, *running),
    )


def _error_words(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{words_of(error)} (limit {files}: raise it with ulimit -n)"
    return words_of(error)


MARKER_PREFIX = ".ddpdoctor-check-"

MARKER_SEEN_WITHIN = 4.0
"""Seconds. An NFS client may answer from its cache for up to ``acdirmin`` (30 s), but it asks the
server for a name that it never looked up."""

SAMPLED_FILES = 200


def marker_seen(folder: Path, token: str) -> bool:
    """Return whether the marker file appears here, with the right content."""
    marker = folder / f"{MARKER_PREFIX}{token}"
    until = time.monotonic() + MARKER_SEEN_WITHIN
    while True:
        with contextlib.suppress(OSError):
            # Listing the directory makes an NFS client ask the server again.
            os.listdir(folder)
            # The user of another node may have another uid here.
            if opening.contents(marker, 4096, links=True) == token.encode():
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)


def folder_hash(folder: Path) -> str:
    """Hash the names and sizes of a sample of the directory's files; empty if it cannot be read."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith(MARKER_PREFIX))
    except OSError:
        return ""
    step = max(1, len(names) // SAMPLED_FILES)
    digest = hashlib.sha256(str(len(names)).encode())
    for name in names[::step]:
        digest.update(name.encode(errors="surrogateescape"))
        with contextlib.suppress(OSError):
            digest.update(str((folder / name).stat().st_size).encode())
    return digest.hexdigest()[:16]


def remove_marker(folder: Path, token: str) -> None:
    """Remove the marker file."""
    with contextlib.suppress(OSError):
        (folder / f"{MARKER_PREFIX}{token}").unlink()


# -- meet


GATHER_TIMEOUT = 30.0  # Seconds to wait for absent nodes; at most half of ``--timeout``

LOCAL_TIMEOUT = 10.0
"""The same for an endpoint on localhost, where only nodes of this machine can come."""

CANCEL_INTERVAL = 1.0  # Seconds after which a task that still runs is cancelled again
SCOUT_INTERVAL = 1.0
OWN_CALLS = 5
NAMED_NODES = 4  # If more nodes are absent, the user is shown only their number

ELSEWHERE: frozenset[Kind] = frozenset({"refused", "no host", "silent", "other service"})
"""Problems at an endpoint that show node rank 0 that it is not its own. Lost packets prove nothing:
many routers do not let a machine reach itself from outside."""

DOUBLE_ADDRESS = "double address"  # Reported by a node whose address another machine has as well

WITH_TIME: frozenset[Kind] = frozenset({"refused", "dropped", "silent", "late", "gone", "time"})
"""Problems that a lack of CPU time can cause: the node calls too late, or is given up on."""

REDUCING = frozenset({"gloo-nodes", "nccl-nodes"})  # The checks that need ranks with torch


@dataclass(frozen=True)
class Meeting:
    """The result of a meeting. The report is the same on every node."""

    place: NodePlace
    own: int = -1  # The index of this node in ``nodes``; -1 if it is not among them
    problem: Problem | None = None  # Why this node did not meet the others; None if it did
    holder: bool = False  # Whether this node should coordinate, but cannot listen
    foreign: tuple[str, ...] = ()
    """The endpoint's addresses, if this is node rank 0 and they are not its own."""
    own_endpoint: bool = False  # Whether the endpoint is this machine, and it is not node rank 0
    report: Report = field(default_factory=Report)
    took: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each stage took, if there was no time for all of them."""

    @property
    def timed_out(self) -> bool:
        """Whether this node ran out of time."""
        return self.problem is not None and self.problem.kind == "time"

    @property
    def undecided(self) -> bool:
        """Whether the nodes might have met if they had had enough CPU time."""
        if self.problem is None:
            return len(self.nodes) < self.expected
        return self.problem.kind in WITH_TIME and not self.holder

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that came, by node rank."""
        return self.report.nodes

    @property
    def expected(self) -> int:
        """The number of nodes that should come, by the coordinator's options."""
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
        # Open the files that an event loop needs: without them, a loop prints a traceback.
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
    stages, began = Stages(), time.monotonic()
    meeting = asyncio.ensure_future(_meet(situation, stages))
    with ProcessClock() as clock:
        try:
            while not meeting.done() and situation.deadline.left() > 0:
                await asyncio.wait({meeting}, timeout=POLL_INTERVAL)
        finally:
            if not meeting.done():
                meeting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await meeting
    met = None if meeting.cancelled() else meeting.result()
    stages.begin("")
    starved = clock.lost > STARVED_SHARE * (time.monotonic() - began)
    if met is not None and not (met.undecided if starved else met.timed_out):
        return met
    took = {**stages.took, "waiting for a core": clock.lost}
    return Meeting(node_place(situation), problem=Problem("time"), took=took)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait for their end.

    Before Python 3.12, a task whose awaited result has just arrived misses its cancellation.
    """
    pending = {*tasks}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_INTERVAL)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _meet(situation: Situation, stages: Stages) -> Meeting:
    began = time.monotonic()
    options = situation.options
    place = node_place(situation)
    listener = Listener()
    ranks = Ranks(situation.environ)
    reduces = situation.chosen is None or bool(situation.chosen & REDUCING)
    try:
        port = await listener.open()
        if reduces:
            ranks.start()
        stages.begin(NAMES)
        facts = await asyncio.to_thread(gather_facts, situation, place, port, reduces=reduces)
        goal = Goal(place.host, place.port, key_of(place.rdzv_id), host_of(situation), place.rank)
        gather_until = began + min(GATHER_TIMEOUT * options.scale, options.timeout / 2)
        deadline = time.monotonic() + situation.deadline.left()
        stages.begin(OTHERS)
        node = Participant(
            situation, place, goal, facts, listener, ranks, gather_until, deadline, stages
        )
        return await node.meet()
    finally:
        await listener.close()
        ranks.stop()


@dataclass
class Participant:
    """This node while it joins the others, as the coordinator or as a caller."""

    situation: Situation
    place: NodePlace
    goal: Goal
    facts: Facts
    listener: Listener
    ranks: Ranks
    gather_until: float
    deadline: float
    stages: Stages

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
            here,
            self.facts.machine,
            self.place.nnodes,
            self.place.port,
            self.deadline,
            options.scale,
            options.soak,
        )
        lead = asyncio.ensure_future(phases.run(self.gather_until))
        work = asyncio.ensure_future(self._work_here())
        scout = asyncio.ensure_future(self._scout(here, at_home))
        reminder = asyncio.ensure_future(self._say_who_is_missing(here))
        try:
            await asyncio.wait({work, scout, lead}, return_when=asyncio.FIRST_COMPLETED)
            if lead.done():
                # Raise its exception. It is a defect, and is reported as such.
                lead.result()
            if scout.done() and (call := scout.result()) is not None:
                return await self._work(call)
            foreign = () if at_home else addresses
            return replace(await work, foreign=foreign)
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
        problem = Problem("time")
        for _ in range(OWN_CALLS):
            # Callers without the id may hold all places briefly.
            try:
                return await self._work(await self._call_here())
            except CallError as error:
                problem = error.problem
            await asyncio.sleep(SCOUT_INTERVAL)
        closed = problem.kind in ("dropped", "prohibited")  # Closed even for this machine itself
        return Meeting(self.place, problem=problem if closed else Problem("time"))

    async def _say_who_is_missing(self, here: Coordinator) -> None:
        """Tell the user after a while which nodes are still missing."""
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
            call = await joining.join(
                self.goal, self.gather_until, say, appears=appears, trouble=self._trouble
            )
        except CallError as error:
            return Meeting(self.place, problem=error.problem)
        return await self._work(call)

    async def _trouble(self) -> str:
        other = await asyncio.to_thread(shared_address, self.situation)
        return "" if other is None else DOUBLE_ADDRESS

    async def _work(self, call: Call) -> Meeting:
        """Carry out the coordinator's orders, until it sends its report."""
        own = self.situation.verdicts
        worker = Worker(
            call, self.place, self.facts, self.listener, self.ranks, own, stages=self.stages
        )
        try:
            report = await worker.run(self.deadline)
        except WireError as error:
            kind: Kind = "time" if time.monotonic() >= self.deadline else "gone"
            return Meeting(self.place, problem=Problem(kind, words=str(error)))
        except CallError as error:
            return Meeting(self.place, problem=error.problem)
        finally:
            await call.link.close()
        return Meeting(self.place, worker.index, report=report)
