"""The node at the rendezvous endpoint: gathers the others, leads them through the phases."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Any

from ddpdoctor.preflight.machine.network import dialled_at, gloo_dials, is_loopback
from ddpdoctor.preflight.protocol import connecting, pairs, wire
from ddpdoctor.preflight.protocol.connecting import CONNECT_LIMIT
from ddpdoctor.preflight.protocol.joining import side_doors
from ddpdoctor.preflight.protocol.messages import (
    Answer,
    Caller,
    Facts,
    Folder,
    Knock,
    NcclReport,
    Node,
    Order,
    RankResult,
    Reduction,
    Report,
    Speeds,
    StageReport,
    Verdict,
    Welcome,
    unpack_facts,
)
from ddpdoctor.preflight.protocol.pairs import STALL_LIMIT, STALLS, Dialled, Target
from ddpdoctor.preflight.protocol.wire import Link, WireError, unpacked
from ddpdoctor.preflight.selftest.collectives import LATE
from ddpdoctor.preflight.selftest.reduction import AGAIN
from ddpdoctor.run.records.base import as_json

# -- the node at the rendezvous endpoint: gathers the others, and asks them what they find


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
        self._admission = connecting.Admission()
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
            receiving = link.receive(UNPROVED_LIMIT, connecting.PROOF_BYTES)
            message = await connecting.proof_in_time(receiving)
            try:
                knock = unpacked(Knock, message)
            except ValueError:
                knock = Knock()
            if wire.proves(knock.proof, self._key, "node", challenge):
                return knock
            self.uninvited += 1
            caller = Caller(knock.host, address)
            self.strangers = [*_without(self.strangers, caller), caller][-MOST_STRANGERS:]
            await connecting.proof_in_time(link.send(Welcome(refused="id")))
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
                    unpack_facts(message["facts"]),
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


# -- what the coordinator has the nodes do, one phase after the other, and what comes of it


SMALL_SEGMENTS = (536, 1160, 1240, 1360, 1410)
"""Bytes of payload per packet that are tried where 64 KiB stalled: packets of 40 bytes more."""

TIMES_ALONE = 5

MOST_SUSPECTS = 16
"""Slow links that are measured again, alone."""

REDUCTION_LIMIT = 20.0
"""Seconds for gloo to connect all ranks and reduce."""

STAGE_LIMIT = 20.0
"""Seconds for NCCL to connect a set of ranks and reduce."""

STAGE_LIMIT_RANK = 0.01
"""And so many more for each rank of the job."""

IMPORT_LIMIT = 25.0

VERDICT_LIMIT = 10.0
"""Seconds for the checks of all machines to end, once all else is known."""

END_LIMIT = 10.0
"""Seconds for the report to reach all nodes."""

STARVED_RANKS = "not all ranks could import torch: for lack of CPU, no link can be judged"
"""Importing torch keeps the cores busy, and links look slow."""

MOST_SETS = 64
"""Sets of nodes of one stage whose bus bandwidth is reported: the slowest."""

DialCell = tuple[int, int, str]
"""The dialling node, the dialled node, and which of its addresses: ``route``, ``gloo`` or
``nccl``."""


@dataclass
class Phases:
    """One check of the nodes, as its coordinator runs it.

    Attributes:
        coordinator: Where the nodes come.
        nnodes: How many nodes are expected.
        port: Of the rendezvous.
        deadline: Monotonic time at which all has to be over.
        scale: How much longer than usual each stage may take.
        soak: Seconds for which the collectives are repeated.
    """

    coordinator: Coordinator
    nnodes: int
    port: int
    deadline: float
    scale: float = 1.0
    soak: float = 0.0

    async def run(self, gather_until: float) -> None:
        """Gather the nodes, test what lies between them, and send all of them the same report."""
        began = time.monotonic()
        members = await self.coordinator.gather(gather_until)
        gathered = round(time.monotonic() - began, 3)
        token = self.coordinator.token.hex()
        rosters = {
            index: Order("roster", index=index, token=token) for index in range(len(members))
        }
        await self.coordinator.ask(rosters, "the roster", 10 * self.scale)
        dials = await self._dials(members)
        bad = {(i, j) for i, j, kind in dials if kind == "route"}
        reason = self._why_no_reduction(members, dials)
        # Importing torch keeps the cores busy, and would be taken for a slow link.
        unready = await self._settle(members, needed=not reason)
        lacks_cpu = any(why == LATE for _, why, _ in unready)
        speed = Speeds(untested=STARVED_RANKS) if lacks_cpu else await self._speeds(members, bad)
        folder = await self._folder(members)
        reason = reason or self._why_no_reduction(members, dials)
        if unready:
            reason = reason or "not all ranks have torch"
        reduction = Reduction(skipped=reason, unready=tuple(unready))
        if not reason:
            reduction = await self._reduction(members, dials)
        report = Report(
            expected=self.nnodes,
            nodes=tuple(_node(member, members) for member in members),
            strangers=tuple(self.coordinator.strangers),
            uninvited=self.coordinator.uninvited,
            surplus=tuple(self.coordinator.surplus[:32]),
            blocked=tuple(self.coordinator.blocked[:256]),
            bad=tuple((*cell, dials[cell]) for cell in sorted(dials)),
            speed=speed,
            folder=folder,
            reduction=reduction,
            verdicts=await self._verdicts(members),
            gathered=gathered,
        )
        left = self.deadline - time.monotonic()
        await self.coordinator.send_all(
            Order("end", report=report), max(1.0, min(END_LIMIT * self.scale, left))
        )

    async def _verdicts(self, members: Sequence[Member]) -> tuple[Verdict, ...]:
        """What each machine's own checks found: they run beside all of this."""
        left = self.deadline - time.monotonic()
        limit = max(1.0, min(VERDICT_LIMIT * self.scale, left / 2))
        order = Order("verdict", limit=limit)
        orders = dict.fromkeys(range(len(members)), order)
        answers = await self.coordinator.ask(orders, "the verdicts", limit + 5 * self.scale)
        none = Answer()
        return tuple(answers.get(index, none).verdict for index in range(len(members)))

    async def _dials(self, members: Sequence[Member]) -> dict[DialCell, Dialled]:
        """Every node dials every other; what failed twice."""
        wanted = {
            (i, j, kind): target
            for i in range(len(members))
            for j in range(len(members))
            if i != j
            for kind, target in _targets(members, i, j).items()
        }
        failed = await self._dial(len(members), wanted)
        again = await self._dial(len(members), {cell: wanted[cell] for cell in failed})
        stalled = {cell: wanted[cell] for cell in again if again[cell].outcome in STALLS}
        # Which packet sizes still pass where 64 KiB stalled.
        for mss in SMALL_SEGMENTS if stalled else ():
            small = {cell: replace(target, mss=mss) for cell, target in stalled.items()}
            left = await self._dial(len(members), small)
            if len(left) == len(stalled):
                break
            for cell in stalled.keys() - left.keys():
                again[cell] = replace(again[cell], passes=mss + 40)
        return again

    async def _dial(self, nodes: int, wanted: Mapping[DialCell, Target]) -> dict[DialCell, Dialled]:
        """Dial, all nodes at once; the cells that failed."""
        cells: dict[int, list[DialCell]] = {}
        # Each begins with its neighbour in the ring, so that not all dial the same node first.
        for cell in sorted(wanted, key=lambda cell: (cell[0], (cell[1] - cell[0]) % nodes)):
            cells.setdefault(cell[0], []).append(cell)
        orders = {
            index: Order("dial", targets=tuple(wanted[cell] for cell in listed))
            for index, listed in cells.items()
        }
        # A busy machine takes longer, and is not to be taken for one that went away.
        seconds = (3 * (CONNECT_LIMIT + STALL_LIMIT) + 0.2 * nodes) * self.scale
        answers = await self.coordinator.ask(orders, "dialling", seconds)
        return {
            cell: result
            for index, answer in answers.items()
            for cell, result in zip(cells[index], answer.dialled, strict=False)
            if result.outcome != "ok"
        }

    async def _settle(
        self, members: Sequence[Member], *, needed: bool
    ) -> list[tuple[int, str, float]]:
        """Wait until the ranks have imported torch; the nodes on which not all have, and why."""
        left = self.deadline - self.soak - time.monotonic()
        # Of a short time limit half is for the import, and half for what comes after it.
        rest = max(left - REDUCTION_LIMIT * self.scale, left / 2)
        limit = max(1.0, min(IMPORT_LIMIT * self.scale, rest))
        order = Order("settle", needed=needed, limit=limit)
        orders = dict.fromkeys(range(len(members)), order)
        answers = await self.coordinator.ask(orders, "importing torch", limit + 5)
        return [
            (index, answer.unready, round(limit, 1))
            for index, answer in sorted(answers.items())
            if answer.unready
        ]

    async def _speeds(self, members: Sequence[Member], bad: set[pairs.NodePair]) -> Speeds:
        measured: dict[pairs.NodePair, pairs.Speed] = {}
        for shift in pairs.ring_shifts(len(members)):
            cells = [(i, (i + shift) % len(members)) for i in range(len(members))]
            measured |= await self._measure(members, [cell for cell in cells if cell not in bad])
        suspects = pairs.links_to_repeat(measured)[:MOST_SUSPECTS]
        confirmed = {cell for cell in suspects if await self._stays_bad(members, cell, measured)}
        return _judged(measured, confirmed) if measured else Speeds()

    async def _stays_bad(
        self,
        members: Sequence[Member],
        cell: pairs.NodePair,
        measured: dict[pairs.NodePair, pairs.Speed],
    ) -> bool:
        """Whether a link is slow or lossy, too, while the other nodes are idle.

        The best of what is ``measured`` counts, since a busy machine makes a link look slow, and
        nothing makes it look fast.
        """
        for _ in range(TIMES_ALONE):
            again = await self._measure(members, [cell])
            if cell in again:
                measured[cell] = pairs.better_speed(measured[cell], again[cell])
            if cell not in pairs.slow_links(measured) and not measured[cell].lossy:
                return False
        return True

    async def _measure(
        self, members: Sequence[Member], cells: Sequence[pairs.NodePair]
    ) -> dict[pairs.NodePair, pairs.Speed]:
        # Where NCCL or gloo will dial, if that is not on the way to node 0.
        targets = {(i, j): _targets(members, i, j) for i, j in cells}
        orders = {i: Order("speed", targets=(list(targets[i, j].values())[-1],)) for i, j in cells}
        answers = await self.coordinator.ask(
            orders, "measuring", 3 * pairs.MEASURE_LIMIT * self.scale
        )
        return {
            (i, j): pairs.Speed(each.rtt, each.bandwidth, each.waited, each.sent, each.resent)
            for i, j in cells
            if (each := answers.get(i)) is not None and each.bandwidth
        }

    async def _folder(self, members: Sequence[Member]) -> Folder:
        asked = tuple(index for index, member in enumerate(members) if member.facts.folder)
        if not asked or len(members) < 2:
            return Folder(asked)
        writer, *others = asked
        look = Order("folder", action="look", token=self.coordinator.token.hex())
        write, remove = replace(look, action="write"), replace(look, action="remove")
        written = await self.coordinator.ask({writer: write}, "the folder", 10 * self.scale)
        error = written[writer].error if writer in written else "no answer"
        if error:
            return Folder(asked, error)
        answers = await self.coordinator.ask(
            dict.fromkeys(asked, look), "the folder", 15 * self.scale
        )
        await self.coordinator.ask({writer: remove}, "the folder", 10 * self.scale)
        seen = tuple(index for index in others if index in answers and answers[index].seen)
        return Folder(asked, "", seen, tuple(answers[index].listing for index in sorted(answers)))

    def _why_no_reduction(
        self, members: Sequence[Member], dials: Mapping[DialCell, Dialled]
    ) -> str:
        """Why reducing across the nodes would only wait for what is known already."""
        facts = [member.facts for member in members]
        ranks = [each.rank for each in facts if each.rank is not None]
        closed = any(
            result.outcome in STALLS or gloo_dials(facts[i].gloo_address, facts[j].gloo_address)
            for (i, j, kind), result in dials.items()
            if kind != "nccl"
        )
        reasons = {
            "not asked for on every node": not all(each.reduces for each in facts),
            f"{len(members)} of {self.nnodes} nodes are here": len(members) < self.nnodes,
            "a node went away": any(member.lost for member in members),
            "the nodes do not agree on their number": len({each.nnodes for each in facts}) > 1,
            "two nodes have one node rank": len(set(ranks)) < len(ranks),
            "gloo would not start on every node": not all(each.gloo_address for each in facts),
            "not all nodes reach each other as gloo will dial them": closed,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    async def _reduction(
        self, members: Sequence[Member], dials: Mapping[DialCell, Dialled]
    ) -> Reduction:
        # The store of the test listens where the job's will.
        self.coordinator.free_port()
        node_of = [index for index, member in enumerate(members) for _ in range(member.facts.nproc)]
        closed = any(kind == "nccl" for _, _, kind in dials)
        nccl = not closed and not any(member.facts.no_nccl for member in members)
        left = max(4.0, self.deadline - time.monotonic() - 3)
        # What the ranks know by then has to reach us in time.
        most = REDUCTION_LIMIT * self.scale
        patience = left - 2 if nccl else min(most + 3 + self.soak, left - 2)
        order = Order(
            "reduce",
            limit=min(most, patience - 1),
            port=self.port,
            world=len(node_of),
            stage_limit=min(STAGE_LIMIT * self.scale + len(node_of) * STAGE_LIMIT_RANK, patience),
            patience=patience,
            nccl=nccl,
            soak=self.soak,
            node_of=tuple(node_of),
        )
        orders = {
            index: replace(order, first=sum(each.facts.nproc for each in members[:index]))
            for index in range(len(members))
        }
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
            correct=len(results) - len(wrong),
            correct_nodes=len(answers.keys() - {result.node for result in wrong}),
            bus=min((result.bus for result in results), default=0.0),
            idle=min((result.idle for result in results), default=0.0),
            rounds=min((result.rounds for result in results), default=0),
            wrong=tuple(wrong[:64]),
            nccl=nccl_report(results) if nccl else None,
        )


def nccl_report(results: Sequence[RankResult]) -> NcclReport:
    """The stages of the NCCL test over all ranks: errors, and bus bandwidths by set of nodes."""
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
                tuple(sorted(bus[name].items(), key=lambda each: each[1])[:MOST_SETS]),
            )
            for name, failed in errors.items()
        ),
        again=tuple((*pair, works) for pair, works in sorted(again.items())),
        untested=next((stages.untested for _, stages in tested if stages.untested), ""),
    )


def _judged(
    measured: Mapping[pairs.NodePair, pairs.Speed], confirmed: set[pairs.NodePair]
) -> Speeds:
    """What is reported of links, of which those in ``confirmed`` stayed bad."""
    lossy = [cell for cell in measured if cell in confirmed and measured[cell].lossy]
    # What is lost is sent again, and late: that is one fault.
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


def _targets(members: Sequence[Member], source: int, target: int) -> dict[str, Target]:
    """Where a node dials another, by the kind of the address."""
    here, there = members[source], members[target]
    address = there.address
    if is_loopback(address) and not is_loopback(here.address):
        # The coordinator's own machine: as the dialling node reached it.
        address = here.reached
    found = dialled_at(here.facts, there.facts, address)
    return {kind: Target(target, each, there.facts.pair_port) for kind, each in found.items()}


def _node(member: Member, members: Sequence[Member]) -> Node:
    address = member.address
    if is_loopback(address):
        reached = (other.reached for other in members if not is_loopback(other.reached))
        address = next(reached, address)
    return Node(member.facts, address, member.offset, member.uncertainty, member.lost, member.why)
