"""What the coordinator has the nodes do, one phase after the other, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high

from ddpdoctor.preflight.protocol import speeds
from ddpdoctor.preflight.protocol.addresses import dialled_at, gloo_dials, is_loopback
from ddpdoctor.preflight.protocol.connecting import CONNECT_LIMIT
from ddpdoctor.preflight.protocol.coordinator import Coordinator, Member
from ddpdoctor.preflight.protocol.messages import Answer, Order
from ddpdoctor.preflight.protocol.pairs import STALL_LIMIT, STALLS, Dialled, Target
from ddpdoctor.preflight.protocol.ranks import LATE
from ddpdoctor.preflight.protocol.reduction import AGAIN
from ddpdoctor.preflight.protocol.report import (
    Folder,
    NcclReport,
    Node,
    RankResult,
    Reduction,
    Report,
    Speeds,
    StageReport,
    Verdict,
)

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

STARVED = "not all ranks could import torch: for lack of CPU, no link can be judged"
"""Importing torch keeps the cores busy, and links look slow."""

MOST_SETS = 64
"""Sets of nodes of one stage whose bus bandwidth is reported: the slowest."""

Cell = tuple[int, int, str]
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
        speed = Speeds(untested=STARVED) if lacks_cpu else await self._speeds(members, bad)
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

    async def _dials(self, members: Sequence[Member]) -> dict[Cell, Dialled]:
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

    async def _dial(self, nodes: int, wanted: Mapping[Cell, Target]) -> dict[Cell, Dialled]:
        """Dial, all nodes at once; the cells that failed."""
        cells: dict[int, list[Cell]] = {}
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

    async def _speeds(self, members: Sequence[Member], bad: set[speeds.Cell]) -> Speeds:
        measured: dict[speeds.Cell, speeds.Speed] = {}
        for shift in speeds.shifts(len(members)):
            cells = [(i, (i + shift) % len(members)) for i in range(len(members))]
            measured |= await self._measure(members, [cell for cell in cells if cell not in bad])
        suspects = speeds.suspects(measured)[:MOST_SUSPECTS]
        confirmed = {cell for cell in suspects if await self._stays_bad(members, cell, measured)}
        return _judged(measured, confirmed) if measured else Speeds()

    async def _stays_bad(
        self,
        members: Sequence[Member],
        cell: speeds.Cell,
        measured: dict[speeds.Cell, speeds.Speed],
    ) -> bool:
        """Whether a link is slow or lossy, too, while the other nodes are idle.

        The best of what is ``measured`` counts, since a busy machine makes a link look slow, and
        nothing makes it look fast.
        """
        for _ in range(TIMES_ALONE):
            again = await self._measure(members, [cell])
            if cell in again:
                measured[cell] = speeds.better(measured[cell], again[cell])
            if cell not in speeds.outliers(measured) and not measured[cell].lossy:
                return False
        return True

    async def _measure(
        self, members: Sequence[Member], cells: Sequence[speeds.Cell]
    ) -> dict[speeds.Cell, speeds.Speed]:
        # Where NCCL or gloo will dial, if that is not on the way to node 0.
        targets = {(i, j): _targets(members, i, j) for i, j in cells}
        orders = {i: Order("speed", targets=(list(targets[i, j].values())[-1],)) for i, j in cells}
        answers = await self.coordinator.ask(orders, "measuring", 3 * speeds.LIMIT * self.scale)
        return {
            (i, j): speeds.Speed(each.rtt, each.bandwidth, each.waited, each.sent, each.resent)
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

    def _why_no_reduction(self, members: Sequence[Member], dials: Mapping[Cell, Dialled]) -> str:
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
        self, members: Sequence[Member], dials: Mapping[Cell, Dialled]
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


def _judged(measured: Mapping[speeds.Cell, speeds.Speed], confirmed: set[speeds.Cell]) -> Speeds:
    """What is reported of links, of which those in ``confirmed`` stayed bad."""
    lossy = [cell for cell in measured if cell in confirmed and measured[cell].lossy]
    # What is lost is sent again, and late: that is one fault.
    alone = confirmed - set(lossy)
    outliers = [cell for cell in speeds.outliers(measured) if cell in alone]
    slow = [cell for cell in outliers if measured[cell].waited < speeds.STARVED]
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
