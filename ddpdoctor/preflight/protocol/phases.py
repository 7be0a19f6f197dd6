"""What the coordinator has the nodes do, one phase after the other, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ddpdoctor.preflight.place import Seat
from ddpdoctor.preflight.protocol import speeds
from ddpdoctor.preflight.protocol.addresses import gloo_dials, is_loopback
from ddpdoctor.preflight.protocol.connecting import CONNECT_LIMIT
from ddpdoctor.preflight.protocol.coordinator import Coordinator, Member, packed_token
from ddpdoctor.preflight.protocol.pairs import STALL_LIMIT, STALLS
from ddpdoctor.preflight.protocol.reduction import AGAIN

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

MOST_SETS = 64
"""Sets of nodes of one stage whose bus bandwidth is told: the slowest."""

Cell = tuple[int, int, str]
"""The dialling node, the dialled node, and which of its addresses: ``route`` or ``gloo``."""


class Lead:
    """One check of the nodes, as its coordinator leads it.

    Args:
        coordinator: Where the nodes come.
        seat: The coordinator's own place.
        deadline: Monotonic time at which all has to be over.
    """

    def __init__(self, coordinator: Coordinator, seat: Seat, deadline: float) -> None:
        self.coordinator = coordinator
        self.seat = seat
        self.deadline = deadline
        self.phases: dict[str, float] = {}

    async def run(self, gather_until: float) -> None:
        """Gather the nodes, test what lies between them, and tell all of them the same."""
        members = await self._timed("gather", self.coordinator.gather(gather_until))
        await self._roster(members)
        dials = await self._timed("links", self._dials(members))
        bad = {(i, j) for i, j, kind in dials if kind == "route"}
        reason = self._why_no_reduction(members, dials)
        # Importing torch keeps the cores busy, and would be taken for a slow link.
        unready = await self._timed("settle", self._settle(members, needed=not reason))
        speed = await self._timed("speed", self._speeds(members, bad))
        folder = await self._timed("folder", self._folder(members))
        reason = reason or self._why_no_reduction(members, dials)
        if unready:
            reason = reason or "not all ranks have torch"
        reduction: dict[str, Any] = {"skipped": reason, "unready": unready}
        if not reason:
            reduction = await self._timed("reduction", self._reduction(members))
        blob = {
            "expected": self.seat.nnodes,
            "nodes": [_told(member, members) for member in members],
            "strangers": self.coordinator.strangers[:32],
            "surplus": self.coordinator.surplus[:32],
            "blocked": self.coordinator.blocked[:256],
            "bad": [[*cell, dials[cell]] for cell in sorted(dials)],
            "speed": speed,
            "folder": folder,
            "reduction": reduction,
            "phases": self.phases,
        }
        await self.coordinator.tell({"do": "end", "blob": blob})

    async def _timed(self, phase: str, awaited: Any) -> Any:
        began = time.monotonic()
        result = await awaited
        self.phases[phase] = round(time.monotonic() - began, 3)
        return result

    async def _roster(self, members: list[Member]) -> None:
        token = packed_token(self.coordinator.token)
        questions = {
            place: {"do": "roster", "index": place, "token": token} for place in range(len(members))
        }
        await self.coordinator.ask(questions, "the roster", 10)

    async def _dials(self, members: list[Member]) -> dict[Cell, dict[str, Any]]:
        """Every node dials every other; what failed twice."""
        wanted = {
            (i, j, kind): target
            for i in range(len(members))
            for j in range(len(members))
            if i != j
            for kind, target in _targets(members, i, j).items()
        }
        failed = await self._dial(members, wanted, {})
        again = await self._dial(members, {cell: wanted[cell] for cell in failed}, {})
        stalled = {cell: wanted[cell] for cell in again if again[cell]["outcome"] in STALLS}
        for cell, result in again.items():
            result["first"] = failed[cell]["outcome"]
        if stalled:
            await self._sizes(members, stalled, again)
        return again

    async def _sizes(
        self,
        members: list[Member],
        stalled: Mapping[Cell, Mapping[str, Any]],
        results: dict[Cell, dict[str, Any]],
    ) -> None:
        """Which packet sizes still pass where 64 KiB stalled."""
        for mss in SMALL_SEGMENTS:
            left = await self._dial(members, stalled, {"mss": mss})
            if len(left) == len(stalled):
                break
            for cell in stalled:
                if cell not in left:
                    results[cell]["passes"] = mss + 40

    async def _dial(
        self,
        members: list[Member],
        wanted: Mapping[Cell, Mapping[str, Any]],
        more: Mapping[str, Any],
    ) -> dict[Cell, dict[str, Any]]:
        """Dial, all nodes at once; the cells that failed."""
        cells: dict[int, list[Cell]] = {}
        # Each begins with its neighbour in the ring, so that not all dial the same node first.
        for cell in sorted(wanted, key=lambda c: (c[0], (c[1] - c[0]) % len(members))):
            cells.setdefault(cell[0], []).append(cell)
        questions = {
            place: {"do": "dial", "targets": [{**wanted[cell], **more} for cell in listed]}
            for place, listed in cells.items()
        }
        # A busy machine takes longer, and is not to be taken for one that went away.
        seconds = 3 * (CONNECT_LIMIT + STALL_LIMIT) + 0.2 * len(members)
        answers = await self.coordinator.ask(questions, "dialling", seconds)
        return {
            cell: result
            for place, answer in answers.items()
            for cell, result in zip(cells[place], answer["results"], strict=True)
            if result["outcome"] != "ok"
        }

    async def _settle(self, members: list[Member], *, needed: bool) -> list[list[Any]]:
        """Wait until the ranks have imported torch; the nodes on which not all have, and why."""
        left = self.deadline - time.monotonic()
        # Of a short time limit half is for the import, and half for what comes after it.
        limit = max(1.0, min(IMPORT_LIMIT, max(left - REDUCTION_LIMIT, left / 2)))
        questions = {
            place: {"do": "settle", "needed": needed, "limit": limit}
            for place in range(len(members))
        }
        answers = await self.coordinator.ask(questions, "importing torch", limit + 5)
        return [
            [place, answer["unready"], round(limit, 1)]
            for place, answer in sorted(answers.items())
            if answer.get("unready")
        ]

    async def _speeds(self, members: list[Member], bad: set[tuple[int, int]]) -> dict[str, Any]:
        measured: dict[speeds.Cell, speeds.Speed] = {}
        for shift in speeds.shifts(len(members)):
            round_of = [(i, (i + shift) % len(members)) for i in range(len(members))]
            measured |= await self._measure(members, [cell for cell in round_of if cell not in bad])
        confirmed = set()
        for cell in speeds.outliers(measured)[:MOST_SUSPECTS]:
            # Alone this time: the other nodes are idle. The best counts, since a busy machine makes
            # a link look slow, and nothing makes it look fast.
            for _ in range(TIMES_ALONE):
                again = await self._measure(members, [cell])
                if cell in again:
                    measured[cell] = speeds.better(measured[cell], again[cell])
                if cell not in speeds.outliers(measured):
                    break
            else:
                confirmed.add(cell)
        slow = [cell for cell in speeds.outliers(measured) if cell in confirmed]
        rtts = sorted(speed.rtt for speed in measured.values())
        bandwidths = sorted(speed.bandwidth for speed in measured.values())
        return {
            "measured": len(measured),
            "rtt": rtts[len(rtts) // 2] if rtts else 0.0,
            "bandwidth": bandwidths[len(bandwidths) // 2] if bandwidths else 0.0,
            "least": bandwidths[0] if bandwidths else 0.0,
            "slow": [[*cell, measured[cell].rtt, measured[cell].bandwidth] for cell in slow[:256]],
            "cells": [list(cell) for cell in measured] if len(slow) else [],
        }

    async def _measure(
        self, members: list[Member], cells: list[tuple[int, int]]
    ) -> dict[speeds.Cell, speeds.Speed]:
        questions = {
            i: {"do": "speed", "target": _targets(members, i, j)["route"]} for i, j in cells
        }
        answers = await self.coordinator.ask(questions, "measuring", 2 * speeds.LIMIT)
        found = {}
        for i, j in cells:
            answer = answers.get(i, {})
            if answer.get("bandwidth"):
                found[i, j] = speeds.Speed(answer["rtt"], answer["bandwidth"])
        return found

    async def _folder(self, members: list[Member]) -> dict[str, Any]:
        asked = [place for place, member in enumerate(members) if member.facts.folder]
        if not asked or len(members) < 2:
            return {"asked": asked}
        writer, *others = asked
        token = packed_token(self.coordinator.token)
        written = await self.coordinator.ask(
            {writer: {"do": "folder", "action": "write", "token": token}}, "the folder", 10
        )
        error = written.get(writer, {}).get("error", "no answer")
        if error:
            return {"asked": asked, "writer": writer, "error": error}
        answers = await self.coordinator.ask(
            {place: {"do": "folder", "action": "look", "token": token} for place in asked},
            "the folder",
            15,
        )
        await self.coordinator.ask(
            {writer: {"do": "folder", "action": "remove", "token": token}}, "the folder", 10
        )
        return {
            "asked": asked,
            "writer": writer,
            "error": "",
            "seen": [place for place in others if answers.get(place, {}).get("seen")],
            "listings": [[place, answers[place].get("listing", "")] for place in sorted(answers)],
        }

    def _why_no_reduction(self, members: list[Member], dials: Mapping[Cell, Any]) -> str:
        """Why reducing across the nodes would only wait for what is known already."""
        facts = [member.facts for member in members]
        if not all(each.reduces for each in facts):
            return "not asked for on every node"
        if len(members) < self.seat.nnodes:
            return f"{len(members)} of {self.seat.nnodes} nodes are here"
        if len(self.coordinator.present()) < len(members):
            return "a node went away"
        if len({each.nnodes for each in facts}) > 1:
            return "the nodes do not agree on their number"
        ranks = [each.rank for each in facts if each.rank is not None]
        if len(set(ranks)) < len(ranks):
            return "two nodes have one node rank"
        if any(not each.gloo_address for each in facts):
            return "gloo would not start on every node"
        for i, j, kind in dials:
            stalled = dials[i, j, kind]["outcome"] in STALLS
            if stalled or gloo_dials(facts[i].gloo_address, facts[j].gloo_address):
                return "not all nodes reach each other as gloo will dial them"
        return ""

    async def _reduction(self, members: list[Member]) -> dict[str, Any]:
        # The store of the test listens where the job's will.
        self.coordinator.free_port()
        counts = [member.facts.nproc for member in members]
        world = sum(counts)
        nccl = not any(member.facts.no_nccl for member in members)
        left = max(4.0, self.deadline - time.monotonic() - 3)
        # What the ranks know by then has to reach us in time.
        patience = left - 2 if nccl else min(REDUCTION_LIMIT + 3, left - 2)
        limit = min(REDUCTION_LIMIT, patience - 1)
        question = {
            "do": "reduce",
            "port": self.seat.port,
            "world": world,
            "limit": limit,
            "stage_limit": min(STAGE_LIMIT + world * STAGE_LIMIT_RANK, patience),
            "patience": patience,
            "nccl": nccl,
            "node_of": [place for place, count in enumerate(counts) for _ in range(count)],
        }
        questions = {
            place: {**question, "first": sum(counts[:place])} for place in range(len(members))
        }
        answers = await self.coordinator.ask(questions, "reducing", left)
        results = [
            {"node": place, **result}
            for place, answer in sorted(answers.items())
            for result in answer["results"]
        ]
        return {
            "skipped": "",
            "world": world,
            "limit": limit,
            "correct": sum(1 for result in results if result.get("ok")),
            "correct_nodes": sum(
                all(result.get("ok") for result in answer["results"]) for answer in answers.values()
            ),
            "seconds": max((result.get("seconds", 0.0) for result in results), default=0.0),
            "bus": min((result.get("bus", 0.0) for result in results), default=0.0),
            "idle": min((result.get("idle") or 0.0 for result in results), default=0.0),
            "wrong": [result for result in results if not result.get("ok")][:64],
            "nccl": _nccl(results) if nccl else None,
        }


def _nccl(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The stages of the NCCL test over all ranks: errors, and bus bandwidths by set of nodes."""
    errors: dict[str, list[list[Any]]] = {}
    bus: dict[str, dict[tuple[int, ...], float]] = {}
    again: dict[tuple[int, int], bool] = {}
    correct = 0
    untested = ""
    for result in results:
        told = result.get("stages") or {}
        correct += bool(told.get("ok"))
        untested = untested or told.get("untested", "")
        for stage in told.get("stages", []):
            if stage["name"] == AGAIN:
                suspect, other = stage["nodes"]
                again[suspect, other] = again.get((suspect, other), True) and not stage["error"]
                continue
            failed = errors.setdefault(stage["name"], [])
            measured = bus.setdefault(stage["name"], {})
            if stage["error"]:
                failed.append([result["node"], stage["nodes"], stage["error"]])
            elif stage["bus"]:
                # A set is as fast as its slowest rank.
                nodes = tuple(stage["nodes"])
                measured[nodes] = min(stage["bus"], measured.get(nodes, stage["bus"]))
    return {
        "correct": correct,
        "stages": [[name, errors[name][:16], _slowest(bus[name])] for name in errors],
        # Each node of a pair that failed, one of the others, and whether these two work.
        "again": [[*pair, works] for pair, works in sorted(again.items())],
        "untested": untested,
    }


def _slowest(bus: Mapping[tuple[int, ...], float]) -> list[list[Any]]:
    chosen = sorted(bus, key=lambda nodes: bus[nodes])[:MOST_SETS]
    return [[list(nodes), bus[nodes]] for nodes in chosen]


def _targets(members: list[Member], source: int, target: int) -> dict[str, dict[str, Any]]:
    """Where a node dials another: at the address it has on the way to us, and at gloo's."""
    here, there = members[source], members[target]
    address = there.address
    if is_loopback(address):
        # The coordinator's own machine: as the dialling node reached it.
        address = here.reached if not is_loopback(here.address) else address
    found = {"route": address}
    gloo = there.facts.gloo_address
    if gloo and gloo != address and gloo_dials(here.facts.gloo_address, gloo):
        found["gloo"] = gloo
    return {
        kind: {"index": target, "address": each, "port": there.facts.pair_port}
        for kind, each in found.items()
    }


def _told(member: Member, members: list[Member]) -> dict[str, Any]:
    address = member.address
    if is_loopback(address):
        reached = [other.reached for other in members if not is_loopback(other.reached)]
        address = reached[0] if reached else address
    return {
        "facts": member.facts.packed(),
        "address": address,
        "offset": member.offset,
        "uncertainty": member.uncertainty,
        "lost": member.lost,
    }
