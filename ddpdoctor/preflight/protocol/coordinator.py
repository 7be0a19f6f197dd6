"""The node at the rendezvous endpoint: gather the other nodes and lead them through the phases."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Any

from ddpdoctor.preflight.machine.network import dialled_at, gloo_dials, idle_addresses, is_loopback
from ddpdoctor.preflight.protocol import pairs, wire
from ddpdoctor.preflight.protocol.joining import HALF_OPEN, half_open, hear_notices, spare_ports
from ddpdoctor.preflight.protocol.messages import (
    Answer,
    Caller,
    Facts,
    Folder,
    Hello,
    NcclReport,
    Node,
    Order,
    RankResult,
    Reduction,
    Report,
    Speeds,
    StageReport,
    Welcome,
    unpack_facts,
)
from ddpdoctor.preflight.protocol.pairs import STALLS, Dialled, NodePair, Speed, Target
from ddpdoctor.preflight.protocol.wire import Late, Link, WireError, unpacked
from ddpdoctor.preflight.selftest.collectives import LATE
from ddpdoctor.preflight.selftest.ranks import AGAIN
from ddpdoctor.run.records.base import as_json

# -- the server, and the nodes that came


HELLO_TIMEOUT = 10.0  # Seconds for a caller to gather its facts

UNPROVED_TIMEOUT = 60.0
"""Seconds for a proof on a machine that makes no progress; see `connecting.PROOF_SECONDS`."""

MAX_CLOCK_QUESTIONS = 64
POLL_INTERVAL = 0.5

DISAGREEING_WAIT = 3.0
"""Seconds for more nodes after the last one, once it is known that their options differ."""

MAX_REJECTED = 32  # Maximum number of remembered callers with another id. All are counted.
SEGMENT = 536  # Bytes of payload per packet between the coordinator and the nodes


@dataclass
class Member:
    """A node that is connected."""

    link: Link
    facts: Facts
    address: str  # The address from which it connected
    reached: str  # The address of this machine that it reached
    called: str  # The address that it called, which differs if it is translated on the way
    offset: float  # Seconds by which the coordinator's clock is ahead of the node's
    uncertainty: float  # Half a round trip of that estimate, in seconds
    lost: str = ""
    """The phase in which it went away; empty while it is here. ``why`` is the reason."""
    why: str = ""
    late: bool = False  # Whether it only failed to answer in time, and is still connected


class Coordinator:
    """The server at the rendezvous port and the nodes that came. ``scale`` extends all times."""

    def __init__(
        self, listening: socket.socket, key: bytes, nnodes: int, scale: float = 1.0
    ) -> None:
        self.identity = wire.nonce()
        self.token = secrets.token_hex(16)
        self.members: list[Member] = []
        self.rejected: list[Caller] = []
        self.rejected_calls = 0  # Number of calls without a proof
        self.surplus: list[Caller] = []
        self.blocked: list[Caller] = []
        self.callers = False  # Whether another machine has called
        self._listening = listening
        self._key = key
        self._nnodes = nnodes
        self._scale = scale
        self._admission = wire.Admission()
        self._gathered = asyncio.Event()
        self._complete = asyncio.Event()
        self._given_up = False
        self._last_arrival = 0.0
        self._servers: list[asyncio.Server] = []
        self._watches: list[asyncio.Task[None]] = []
        self._notices: asyncio.BaseTransport | None = None

    async def open(self) -> None:
        """Start listening, at a spare port as well if one is free."""
        await self._serve(self._listening)
        self._port = self._listening.getsockname()[1]
        self._notices = await hear_notices(self._port, self._key, self._notice)
        for spare in spare_ports(self._key, self._port):
            with contextlib.suppress(OSError):
                await self._serve(listen(spare))
                break

    def _notice(self, hello: Hello, address: str) -> str:
        """Remember why a node cannot connect. Return `HALF_OPEN` if its calls do arrive."""
        unheard = address in half_open(self._port)
        if hello.blocked and self.gathering:
            kind = "unanswered" if unheard and hello.blocked == "dropped" else hello.blocked
            caller = Caller(hello.host, address, hello.rank, kind)
            self.blocked = [*_without(self.blocked, caller), caller][-MAX_REJECTED:]
        return HALF_OPEN if unheard else ""

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._arrive, sock=listening, backlog=1024)
        self._servers.append(server)

    @property
    def gathering(self) -> bool:
        """Whether nodes may still come."""
        return not self._gathered.is_set() and len(self.members) < self._nnodes

    async def gather(self, until: float) -> list[Member]:
        """Wait for all nodes, or for the monotonic time until which they may come.

        Return the nodes that came, as torchrun orders them. Those without a node rank come last.
        """
        while time.monotonic() < until and not self._given_up:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._complete.wait(), POLL_INTERVAL)
            numbers = {self._nnodes, *(member.facts.nnodes for member in self.members)}
            if len(numbers) > 1:
                # All nodes have to be started again, so it is enough to know which are there.
                here = len(self.members) + len(self.surplus)
                late = time.monotonic() > self._last_arrival + DISAGREEING_WAIT
                if late or here >= max(numbers):
                    break
                await asyncio.sleep(POLL_INTERVAL)
            elif len(self.members) + len(self.blocked) >= self._nnodes:
                # All are here, or have reported that they cannot connect.
                break
        self._gathered.set()
        # A watch holds the reading side of its connection until it has ended.
        await asyncio.gather(*self._watches)
        # With c10d, torchrun orders the nodes by name, not by node rank.
        self.members.sort(
            key=lambda each: (each.facts.master, each.facts.rank is None, each.facts.rank or 0)
        )
        return self.members

    def give_up(self) -> None:
        """Stop waiting for nodes, because the endpoint does not lead here."""
        self._given_up = True

    def free_port(self) -> None:
        """Stop listening. The nodes that are here stay connected."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def close(self) -> None:
        """Stop listening and disconnect all nodes."""
        self.free_port()
        if self._notices is not None:
            self._notices.close()
        for member in self.members:
            await member.link.close()

    async def ask(
        self, orders: Mapping[int, Order], phase: str, seconds: float
    ) -> dict[int, Answer]:
        """Send orders to several nodes at once. Return the answers by the nodes' indices.

        The phase is reported for a node that goes away.
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
                member.late = isinstance(error, Late)
                return
            if answer.failed:
                member.lost, member.why = phase, answer.failed
            else:
                answers[index] = answer

        await asyncio.gather(*(one(*each) for each in orders.items()))
        return answers

    async def ask_all(self, order: Order, phase: str, seconds: float) -> dict[int, Answer]:
        """Send the same order to all nodes; see :meth:`ask`."""
        return await self.ask(dict.fromkeys(range(len(self.members)), order), phase, seconds)

    async def send_all(self, order: Order, seconds: float) -> None:
        """Send the last order to all nodes, and wait until they have it.

        If this process ended sooner, unsent data would be lost, and nodes without the report would
        say that node 0 went away.
        """
        data = wire.packed(order)

        async def one(member: Member) -> None:
            with contextlib.suppress(WireError):
                await member.link.send(data)
                await member.link.receive(seconds)

        await asyncio.gather(*(one(member) for member in self.members if not member.lost))

    async def _arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        member = None
        # asyncio would print the cancellation that ends the check.
        with contextlib.suppress(
            WireError, ValueError, OSError, TypeError, TimeoutError, asyncio.CancelledError
        ):
            member = await self._admit(link)
        if member is None:
            await link.close()
            return
        own = Caller(member.facts.host, member.address)
        if not self.gathering:
            # The gathering ended while this node collected its facts.
            with contextlib.suppress(WireError):
                await link.send({"do": "leave", **as_json(self._refusal(own))})
            await link.close()
            return
        self.members.append(member)
        self._last_arrival = time.monotonic()
        # This time it got through, whatever happened before.
        self.blocked = _without(self.blocked, own)
        self.rejected = _without(self.rejected, own)
        if len(self.members) >= self._nnodes:
            self._complete.set()
        self._watches.append(asyncio.ensure_future(self._watch(member)))

    async def _proved(self, link: Link, address: str) -> Hello | None:
        """Return the first message of a caller that proves the id; None if it does not."""
        with self._admission.place(link.writer, address) as placed:
            if not placed:
                link.writer.transport.abort()
                return None
            challenge = wire.nonce()
            link.writer.write(wire.greeting(challenge))
            receiving = link.receive(UNPROVED_TIMEOUT, wire.PROOF_BYTES)
            message = await wire.proof_in_time(receiving)
            try:
                hello = unpacked(Hello, message)
            except ValueError:
                hello = Hello()
            if wire.proves(hello.proof, self._key, "node", challenge):
                return hello
            self.rejected_calls += 1
            caller = Caller(hello.host, address)
            self.rejected = [*_without(self.rejected, caller), caller][-MAX_REJECTED:]
            await wire.proof_in_time(link.send(Welcome(refused="id")))
        return None

    async def _admit(self, link: Link) -> Member | None:
        address = _plain(link.writer.get_extra_info("peername"))
        reached = _plain(link.writer.get_extra_info("sockname"))
        self.callers = self.callers or not is_loopback(address)
        first = await self._proved(link, address)
        if first is None:
            return None
        caller = Caller(first.host, address)
        welcome = Welcome() if self.gathering else self._refusal(caller)
        proof = wire.proof(self._key, "coordinator", first.nonce)
        await link.send(replace(welcome, proof=proof, identity=self.identity, reached=reached))
        for _ in range(0 if welcome.refused else MAX_CLOCK_QUESTIONS):
            message = await link.receive(HELLO_TIMEOUT * self._scale)
            hello = unpacked(Hello, message)
            if hello.blocked:
                # It came through the spare port, because it finds the rendezvous port closed.
                caller = replace(caller, rank=hello.rank, kind=hello.blocked)
                self.blocked = [*_without(self.blocked, caller), caller]
                return None
            if "facts" in message:
                facts = unpack_facts(message["facts"])
                called = hello.called or reached
                return Member(
                    link, facts, address, reached, called, hello.offset, hello.uncertainty
                )
            await link.send(Welcome(time=time.time()))
        return None

    def _refusal(self, caller: Caller) -> Welcome:
        self.surplus.append(caller)
        self._last_arrival = time.monotonic()
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
    """Return the callers without those on the machine of ``caller``."""
    own = (caller.host, caller.address)
    return [each for each in callers if (each.host, each.address) != own]


def listen(port: int) -> socket.socket:
    """Bind the rendezvous port on all addresses, as torch's store does.

    Raises:
        OSError: The port is taken, or not allowed.
    """
    listening = wire.listen(port)
    with contextlib.suppress(OSError):
        # Packets are small, so that reports about a link that loses large ones arrive.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
    return listening


def _plain(name: Any) -> str:
    """Return the address of a socket's end as plain IPv4 or IPv6, without a zone."""
    return str(name[0]).removeprefix("::ffff:").partition("%")[0]


# -- the phases


SMALL_SEGMENTS = (536, 1160, 1240, 1360, 1410)
"""Bytes of payload per packet to try if 64 KiB stalled. Packets are 40 bytes larger."""

TIMES_ALONE = 5
TIMES_IDLE = 2  # How often a slow link is measured again before others are called faster

MAX_SUSPECTS = 16  # Maximum number of slow links to measure again, alone
REDUCTION_TIMEOUT = 20.0  # Seconds for gloo to connect all ranks and reduce

STAGE_TIMEOUT, STAGE_TIMEOUT_RANK = 20.0, 0.01
"""Seconds for NCCL to connect a set of ranks and reduce, and those added per rank of the job."""

VERDICT_TIMEOUT = 10.0
"""Seconds for the checks of all machines to end, once everything else is known."""

END_TIMEOUT = 10.0  # Seconds for the report to reach all nodes

STARVED_RANKS = "not all ranks could import torch: for lack of CPU, no link can be judged"
"""Importing torch keeps the cores busy, and links look slow."""

MAX_SETS = 64  # Maximum number of node sets reported per stage: those with the lowest bus bandwidth

DialCell = tuple[int, int, str]
"""The dialling node, the dialled node, and which address: ``route``, ``gloo`` or ``nccl``."""


@dataclass
class Phases:
    """One check of the nodes, as its coordinator runs it, until the monotonic deadline.

    ``machine`` is the coordinator's own, see :class:`~messages.Facts`.
    """

    coordinator: Coordinator
    machine: str
    nnodes: int
    port: int
    deadline: float
    scale: float = 1.0
    soak: float = 0.0
    lost_names: tuple[tuple[int, tuple[str, ...], str], ...] = ()
    open: tuple[tuple[int, int, str], ...] = ()

    @property
    def _members(self) -> list[Member]:
        return self.coordinator.members

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    async def run(self, gather_until: float) -> None:
        """Gather the nodes, test the links between them, and send all of them the same report."""
        here, began = self.coordinator, time.monotonic()
        members = await here.gather(gather_until)
        gathered = round(time.monotonic() - began, 3)
        rosters = {i: Order("roster", index=i, token=here.token) for i in range(len(members))}
        await here.ask(rosters, "the roster", 10 * self.scale)
        self.lost_names = await self._lost_names()
        dials = await self._dials()
        reason, reported = self._why_no_reduction(dials)
        # Importing torch keeps the cores busy, which would look like a slow link.
        unready = await self._settle(needed=not reason)
        if any(why == LATE for _, why, _ in unready):
            speed = Speeds(untested=STARVED_RANKS)
        else:
            speed = await self._speeds({(i, j) for i, j, kind in dials if kind == "route"})
        folder = await self._folder()
        if not reason:
            reason, reported = self._why_no_reduction(dials)
        if unready:
            reason = reason or "not all ranks have torch"
        reduction = Reduction(skipped=reason, reported=reported, unready=tuple(unready))
        if not reason:
            reduction = await self._reduction(dials)
        # Meanwhile the checks of each machine run.
        limit = max(1.0, min(VERDICT_TIMEOUT * self.scale, self._left() / 2))
        order = Order("verdict", limit=limit)
        verdicts = await here.ask_all(order, "the verdicts", limit + 5 * self.scale)
        none = Answer()
        report = Report(
            expected=self.nnodes,
            nodes=tuple(map(self._node, members)),
            rejected=tuple(here.rejected),
            rejected_calls=here.rejected_calls,
            surplus=tuple(here.surplus[:32]),
            blocked=tuple(here.blocked[:256]),
            bad=tuple((*cell, dials[cell]) for cell in sorted(dials)),
            open=self.open,
            speed=speed,
            folder=folder,
            reduction=reduction,
            lost_names=self.lost_names,
            verdicts=tuple(verdicts.get(i, none).verdict for i in range(len(members))),
            gathered=gathered,
        )
        limit = max(1.0, min(END_TIMEOUT * self.scale, self._left()))
        await here.send_all(Order("end", report=report), limit)

    async def _lost_names(self) -> tuple[tuple[int, tuple[str, ...], str], ...]:
        """Return the nodes that do not find the first one by the name that torchrun gives them."""
        first = next(iter(self._members), None)
        if first is None or not first.facts.master:
            return ()
        order = Order("resolve", host=first.facts.master)
        answers = await self.coordinator.ask_all(order, "looking up a name", 30 * self.scale)
        return tuple(
            (index, answer.addresses, answer.error)
            for index, answer in sorted(answers.items())
            if self._members[index].facts.machine != first.facts.machine
            and not {*answer.addresses} & {*_own(first)}
        )

    async def _dials(self) -> dict[DialCell, Dialled]:
        """Let every node dial every other. Return the connections that failed twice."""
        nodes = range(len(self._members))
        wanted = {
            (i, j, kind): target
            for i in nodes
            for j in nodes
            if i != j
            for kind, target in self._targets(i, j).items()
        }
        failed = await self._dial(wanted)
        again = await self._dial({cell: wanted[cell] for cell in failed})
        self.open = await self._open_elsewhere(wanted, {cell[:2] for cell in again}, set(again))
        stalled = {cell: wanted[cell] for cell in again if again[cell].outcome in STALLS}
        # Which packet sizes still pass where 64 KiB stalled?
        for mss in SMALL_SEGMENTS if stalled else ():
            small = {cell: replace(target, mss=mss) for cell, target in stalled.items()}
            left = await self._dial(small)
            if len(left) == len(stalled):
                break
            for cell in stalled.keys() - left.keys():
                again[cell] = replace(again[cell], passes=mss + 40)
        return {cell: replace(each, address=wanted[cell].address) for cell, each in again.items()}

    async def _open_elsewhere(
        self, wanted: Mapping[DialCell, Target], partly: set[NodePair], closed: set[DialCell]
    ) -> tuple[tuple[int, int, str], ...]:
        """Return other addresses that are open between nodes, where a connection failed."""
        elsewhere = {cell: target for cell, target in wanted.items() if cell[:2] in partly}
        idle = {
            (i, j, f"idle {number}"): target
            for i, j in partly
            for number, target in enumerate(self._idle(i, j))
        }
        closed |= (await self._dial(idle) if idle else {}).keys()
        return tuple(
            (*cell[:2], target.address)
            for cell, target in sorted({**elsewhere, **idle}.items())
            if cell not in closed
        )

    async def _dial(self, wanted: Mapping[DialCell, Target]) -> dict[DialCell, Dialled]:
        """Let all nodes dial at once. Return the connections that failed."""
        nodes = len(self._members)
        cells: dict[int, list[DialCell]] = {}
        # Each begins with its neighbour in the ring, so that not all dial the same node first.
        for cell in sorted(wanted, key=lambda cell: (cell[0], (cell[1] - cell[0]) % nodes)):
            cells.setdefault(cell[0], []).append(cell)
        orders = {
            index: Order("dial", targets=tuple(wanted[cell] for cell in listed))
            for index, listed in cells.items()
        }
        # A busy machine takes longer, and must not be mistaken for one that went away.
        limit = wire.CONNECT_TIMEOUT + pairs.STALL_TIMEOUT
        seconds = (3 * limit + 0.2 * nodes) * self.scale
        answers = await self.coordinator.ask(orders, "dialling", seconds)
        return {
            cell: result
            for index, answer in answers.items()
            for cell, result in zip(cells[index], answer.dialled, strict=False)
            if result.outcome != "ok"
        }

    async def _settle(self, *, needed: bool) -> list[tuple[int, str, float]]:
        """Wait until the ranks have imported torch. Return the nodes without torch, and why."""
        left = self._left() - self.soak
        # Half of a short time limit is for the import, and half for the tests after it.
        limit = max(1.0, left - REDUCTION_TIMEOUT * self.scale, left / 2)
        order = Order("settle", needed=needed, limit=limit)
        answers = await self.coordinator.ask_all(order, "importing torch", limit + 5)
        return [
            (index, answer.unready, round(limit, 1))
            for index, answer in sorted(answers.items())
            if answer.unready
        ]

    async def _speeds(self, bad: set[NodePair]) -> Speeds:
        nodes = len(self._members)
        measured: dict[NodePair, Speed] = {}
        for shift in pairs.ring_shifts(nodes):
            cells = ((i, (i + shift) % nodes) for i in range(nodes))
            measured |= await self._measure(cell for cell in cells if cell not in bad)
        suspects = pairs.links_to_repeat(measured)[:MAX_SUSPECTS]
        confirmed = {cell for cell in suspects if await self._stays_bad(cell, measured)}
        if not measured:
            return Speeds()
        return replace(_judged(measured, confirmed), idle=await self._idle_speeds(measured))

    async def _idle_speeds(
        self, measured: Mapping[NodePair, Speed]
    ) -> tuple[tuple[int, int, str, float], ...]:
        """Measure the networks that no library takes, where the one that is taken is slow.

        Return them if every node has one that is far faster.
        """
        nodes = len(self._members)
        ring = [(i, (i + 1) % nodes) for i in range(nodes)]
        found = []
        for cell in ring:
            used, idle = measured.get(cell), self._idle(*cell)
            if used is None or used.bandwidth > pairs.SLOW_NETWORK or not idle:
                return ()
            for _ in range(TIMES_IDLE):
                again = (await self._measure([cell])).get(cell)
                used = pairs.better_speed(used, again) if again else used
            fast = [(target.address, await self._speed_at(cell[0], target)) for target in idle]
            address, speed = max(fast, key=lambda each: each[1])
            if used.waited >= pairs.STARVED_SHARE or speed < pairs.FAR_FASTER * used.bandwidth:
                return ()
            found.append((*cell, address, speed))
        return tuple(found)

    async def _speed_at(self, source: int, target: Target) -> float:
        """Return the bandwidth from a node to an address; 0 if it is not reached there."""
        limit = 3 * pairs.MEASURE_TIMEOUT * self.scale
        order = {source: Order("speed", targets=(target,))}
        speed = (await self.coordinator.ask(order, "measuring", limit)).get(source, Answer()).speed
        return speed.bandwidth if speed else 0.0

    def _idle(self, source: int, target: int) -> list[Target]:
        here, there = self._members[source].facts, self._members[target].facts
        route = self._targets(source, target)["route"]
        found = idle_addresses(here, there, route.address)
        return [replace(route, address=address) for address in found]

    async def _stays_bad(self, cell: NodePair, measured: dict[NodePair, Speed]) -> bool:
        """Return whether a link is slow or lossy even while the other nodes are idle.

        The best of several measurements counts: a busy machine makes a link look slow, and nothing
        makes it look fast.
        """
        for _ in range(TIMES_ALONE):
            again = await self._measure([cell])
            if cell in again:
                measured[cell] = pairs.better_speed(measured[cell], again[cell])
            if cell not in pairs.slow_links(measured) and not measured[cell].lossy:
                return False
        return True

    async def _measure(self, cells: Iterable[NodePair]) -> dict[NodePair, Speed]:
        # Use the address that NCCL or gloo will dial, if that is not the one towards node 0.
        targets = {(i, j): list(self._targets(i, j).values())[-1] for i, j in cells}
        orders = {i: Order("speed", targets=(target,)) for (i, _), target in targets.items()}
        limit = 3 * pairs.MEASURE_TIMEOUT * self.scale
        answers = await self.coordinator.ask(orders, "measuring", limit)
        speeds = {cell: answers[cell[0]].speed for cell in targets if cell[0] in answers}
        return {cell: speed for cell, speed in speeds.items() if speed and speed.bandwidth}

    async def _folder(self) -> Folder:
        here, members = self.coordinator, self._members
        asked = tuple(index for index, member in enumerate(members) if member.facts.folder)
        if not asked or len(members) < 2:
            return Folder(asked)
        writer, *others = asked
        look = Order("folder", action="look", token=here.token)
        write, remove = replace(look, action="write"), replace(look, action="remove")
        written = await here.ask({writer: write}, "the folder", 10 * self.scale)
        error = written[writer].error if writer in written else "no answer"
        if error:
            return Folder(asked, error)
        answers = await here.ask(dict.fromkeys(asked, look), "the folder", 15 * self.scale)
        await here.ask({writer: remove}, "the folder", 10 * self.scale)
        seen = tuple(index for index in others if index in answers and answers[index].seen)
        return Folder(asked, "", seen, tuple(answers[index].listing for index in sorted(answers)))

    def _why_no_reduction(self, dials: Mapping[DialCell, Dialled]) -> tuple[str, tuple[str, ...]]:
        """Return why a reduction would hang, and the checks that report it; empty if it works."""
        members = self._members
        facts = [member.facts for member in members]
        ranks = [each.rank for each in facts if each.rank is not None]
        closed = any(
            result.address == facts[j].gloo_address
            and (result.outcome in STALLS or gloo_dials(facts[i], facts[j]))
            for (i, j, _), result in dials.items()
        )
        here = f"{len(members)} of {self.nnodes} nodes are here"
        number = "the nodes do not agree on their number"
        dialled = "not all nodes reach each other as gloo will dial them"
        reasons = (
            (not all(each.reduces for each in facts), "not asked for on every node", ()),
            (len(members) < self.nnodes, here, ("nodes",)),
            (any(member.lost for member in members), "a node went away", ("nodes",)),
            (len({each.nnodes for each in facts}) > 1, number, ("same-job",)),
            (len(set(ranks)) < len(ranks), "two nodes have one node rank", ("same-job",)),
            (
                not all(each.gloo_address for each in facts),
                "gloo would not start on every node",
                ("gloo-addresses",),
            ),
            (bool(self.lost_names), "not all nodes find the first by name", ("gloo-addresses",)),
            (
                len({":" in each.gloo_address for each in facts}) > 1,
                "gloo has IPv6 on some nodes and IPv4 on others",
                ("gloo-addresses",),
            ),
            (closed, dialled, ("links", "packet-size", "gloo-addresses")),
        )
        return next(((words, checks) for holds, words, checks in reasons if holds), ("", ()))

    async def _reduction(self, dials: Mapping[DialCell, Dialled]) -> Reduction:
        members = self._members
        # The store of the test listens where the job's store will.
        self.coordinator.free_port()
        node_of = [index for index, member in enumerate(members) for _ in range(member.facts.nproc)]
        closed = any(kind == "nccl" for _, _, kind in dials)
        nccl = not closed and not any(member.facts.no_nccl for member in members)
        left = max(4.0, self._left() - 3)
        # What the ranks know by then has to arrive here in time.
        most = REDUCTION_TIMEOUT * self.scale
        patience = left - 2 if nccl else min(most + 3 + self.soak, left - 2)
        stage_limit = STAGE_TIMEOUT * self.scale + len(node_of) * STAGE_TIMEOUT_RANK
        order = Order(
            "reduce",
            limit=min(most, patience - 1),
            port=self.port,
            world=len(node_of),
            stage_limit=min(stage_limit, patience),
            patience=patience,
            nccl=nccl,
            soak=self.soak,
            node_of=tuple(node_of),
        )
        orders = {index: replace(order, first=node_of.index(index)) for index in sorted({*node_of})}
        answers = await self.coordinator.ask(orders, "reducing", left)
        results = [
            replace(result, node=index)
            for index, answer in sorted(answers.items())
            for result in answer.ranks
        ]
        wrong = [replace(result, stages=None) for result in results if not result.ok]
        return Reduction(
            world=order.world,
            limit=order.limit,
            asked=most,
            correct=len(results) - len(wrong),
            correct_nodes=len(answers.keys() - {result.node for result in wrong}),
            bus=min((result.bus for result in results), default=0.0),
            idle=min((result.idle for result in results), default=0.0),
            rounds=min((result.rounds for result in results), default=0),
            wrong=tuple(wrong[:64]),
            nccl=nccl_report(results) if nccl else None,
        )

    def _targets(self, source: int, target: int) -> dict[str, Target]:
        """Return the addresses at which a node dials another, by kind."""
        here, there = self._members[source], self._members[target]
        address, _ = self._addresses(there)
        if self._is_here(there) and not self._is_here(here) and here.reached in _own(there):
            # The coordinator's own machine may have several: use the one that this node reached.
            address = here.reached
        found = dialled_at(here.facts, there.facts, address)
        return {kind: Target(target, each, there.facts.pair_port) for kind, each in found.items()}

    def _is_here(self, member: Member) -> bool:
        return is_loopback(member.address) and member.facts.machine == self.machine

    def _addresses(self, member: Member) -> tuple[str, str]:
        """Return the address to dial a node at, and the one it is seen at if not its own."""
        own, seen, reached = _own(member), member.address, ""
        away = [each for each in self._members if not self._is_here(each)]
        if self._is_here(member) and away:
            seen, reached = away[0].called, away[0].reached
        if seen in own or not own or (self._is_here(member) and not away):
            return seen, ""
        known = (reached, member.facts.gloo_address, *own)
        # A tunnel that ends on a machine's loopback says nothing about its other addresses.
        outside = "" if self._is_here(member) and is_loopback(seen) else seen
        return next(each for each in known if each in own), outside

    def _node(self, member: Member) -> Node:
        address, outside = self._addresses(member)
        node = Node(member.facts, address, outside, member.offset, member.uncertainty)
        return replace(node, lost=member.lost, why=member.why, late=member.late)


def _own(member: Member) -> tuple[str, ...]:
    """Return a node's addresses except the loopback, the link-local ones last."""
    found = [each for _, _, addresses in member.facts.interfaces for each in addresses]
    return tuple(sorted(found, key=lambda each: each.startswith(("fe80:", "169.254."))))


def nccl_report(results: Sequence[RankResult]) -> NcclReport:
    """Combine the stages of all ranks: errors, and bus bandwidths by set of nodes."""
    errors: dict[str, list[tuple[int, tuple[int, ...], str]]] = {}
    bus: dict[str, dict[tuple[int, ...], float]] = {}
    again: dict[tuple[int, int], bool] = {}
    tested = [(result.node, result.stages) for result in results if result.stages is not None]
    for node, stages in tested:
        for stage in stages.stages:
            if stage.name == AGAIN and len(stage.nodes) == 2:
                pair = stage.nodes[0], stage.nodes[1]
                again[pair] = again.get(pair, True) and not stage.error
                continue
            failed = errors.setdefault(stage.name, [])
            measured = bus.setdefault(stage.name, {})
            if stage.error:
                failed.append((node, stage.nodes, stage.error))
            elif stage.bus:
                # A set is as fast as its slowest rank.
                measured[stage.nodes] = min(stage.bus, measured.get(stage.nodes, stage.bus))
    return NcclReport(
        correct=sum(stages.ok for _, stages in tested),
        stages=tuple(
            StageReport(
                name,
                tuple(failed[:16]),
                tuple(sorted(bus[name].items(), key=lambda each: each[1])[:MAX_SETS]),
            )
            for name, failed in errors.items()
        ),
        again=tuple((*pair, works) for pair, works in sorted(again.items())),
        untested=next((stages.untested for _, stages in tested if stages.untested), ""),
    )


def _judged(measured: Mapping[NodePair, Speed], confirmed: set[NodePair]) -> Speeds:
    """Report links, of which those in ``confirmed`` stayed bad."""
    lossy = [cell for cell in measured if cell in confirmed and measured[cell].lossy]
    # A lost packet is sent again, and arrives late. Report that as one fault.
    alone = confirmed - set(lossy)
    outliers = [cell for cell in pairs.slow_links(measured) if cell in alone]
    slow = [cell for cell in outliers if measured[cell].waited < pairs.STARVED_SHARE]
    return Speeds(
        starved=len(outliers) - len(slow),
        lossy=tuple((*each, measured[each].sent, measured[each].resent) for each in lossy[:256]),
        measured=len(measured),
        rtt=median_high(speed.rtt for speed in measured.values()),
        bandwidth=median_high(speed.bandwidth for speed in measured.values()),
        least=min(speed.bandwidth for speed in measured.values()),
        slow=tuple((*each, measured[each].rtt, measured[each].bandwidth) for each in slow[:256]),
        cells=tuple(measured) if slow or lossy else (),
    )
