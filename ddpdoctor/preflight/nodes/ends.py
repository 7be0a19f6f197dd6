"""Which end is at fault where a node is not reached at an address that gloo or NCCL takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ddpdoctor.preflight.machine.network import VIRTUAL, dialled_at, is_loopback, is_within
from ddpdoctor.preflight.nodes.reductions import (
    Blame,
    Way,
    all_ways,
    bad_ways,
    blame,
    interface,
    short_of_files,
    with_address,
)
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.protocol.pairs import Dialled

BACK = " back"  # Ends the kind of a connection that a library does not open itself


@dataclass(frozen=True)
class Network:
    """The connections at the addresses that one library takes, where some are not reached."""

    library: str
    failed: dict[Way, Dialled]
    """Those that failed twice, though the two nodes reach each other elsewhere."""
    tested: list[Way]  # All of them
    used: frozenset[Way]  # Those that the library opens itself


def networks(meeting: Meeting) -> Iterator[Network]:
    """Yield networks in which needed connections fail. Skip nodes that may open no files."""
    closed, short = bad_ways(meeting, "route"), short_of_files(meeting)
    failed: dict[str, dict[Way, Dialled]] = {}
    used: dict[str, set[Way]] = {}
    for i, j, kind, result in meeting.report.bad:
        if kind == "route" or (i, j) in closed or short & {i, j} or is_loopback(result.address):
            continue
        network = kind.removesuffix(BACK)
        failed.setdefault(network, {})[i, j] = result
        if network == kind:
            used.setdefault(network, set()).add((i, j))
    for kind, ways in sorted(used.items()):
        targets = {way[1] for way in failed[kind]}
        nccl = kind != "gloo" and all(meeting.nodes[j].facts.nccl_address for j in targets)
        tested = [way for way in all_ways(meeting) if _dials(meeting, way) & {kind, kind + BACK}]
        tested += [way for way in failed[kind] if way not in tested]
        yield Network("NCCL" if nccl else "gloo", failed[kind], tested, frozenset(ways))


def _dials(meeting: Meeting, way: Way) -> set[str]:
    source, target = (meeting.nodes[index] for index in way)
    return set(dialled_at(source.facts, target.facts, target.address))


@dataclass(frozen=True)
class End:
    """The interface by which a node would reach an address; unnamed if the node has none.

    The state is ``down``, ``bare`` without an address, ``apart`` in another network, or ``up``.
    """

    name: str
    state: Literal["down", "bare", "apart", "up", "none"]
    network: str = ""


def end_of(meeting: Meeting, index: int, address: str, name: str) -> End:
    """Return the interface by which a node would reach an address of an interface ``name``."""
    facts = meeting.nodes[index].facts
    within = [each for each in facts.networks if is_within(address, each[1])]
    for own, network in within:
        if own not in facts.down:
            return End(own, "up", network)
    named = within or [each for each in facts.networks if name and each[0] == name]
    if not named:
        return End("", "none")
    own, network = next((each for each in named if (":" in each[1]) == (":" in address)), named[0])
    if own in facts.down:
        return End(own, "down", network)
    if not network or (":" in network) != (":" in address):
        return End(own, "bare")
    # Clouds give every machine a separate network, and route between them.
    return End(own, "up" if network.endswith(("/32", "/128")) else "apart", network)


@dataclass(frozen=True)
class Fault:
    """A cause of failed connections in a network."""

    kind: Literal["choice", "down", "bare", "link"]
    """``choice`` of an address that only its own machine reaches, an interface that is ``down`` or
    ``bare``, or else a ``link``."""
    node: int  # The node at fault; for a single connection, the node that is dialled
    end: End  # The interface at fault
    blame: Blame  # The connections


Seen = tuple[Literal["choice", "down", "bare"], int, End]
"""A fault that shows at one end of a connection: its kind, the node, and the interface."""


def faults(meeting: Meeting, network: Network) -> Iterator[Fault]:
    """Explain the failed connections of a network, each once."""
    found: dict[Seen, list[Way]] = {}
    for way, result in network.failed.items():
        seen = _seen(meeting, way, result.address)
        if seen is not None:
            found.setdefault(seen, []).append(way)
    explained = {way for ways in found.values() for way in ways}
    for (kind, node, end), ways in sorted(found.items(), key=lambda each: each[0][1]):
        if network.used & {*ways}:
            yield Fault(kind, node, end, Blame("way", node, tuple(sorted(ways))))
    left = [way for way in network.failed if way not in explained]
    for each in blame(left, [way for way in network.tested if way not in explained]):
        if network.used & {*each.ways}:
            i, j = next((way for way in each.ways if way[0] == each.node), each.ways[0])
            address = network.failed[i, j].address
            at = each.node if each.kind in ("both", "out of") else i
            end = end_of(meeting, at, address, interface(meeting, j, address)[0])
            yield Fault("link", at if end.state == "none" else each.node, end, each)


def _seen(meeting: Meeting, way: Way, address: str) -> Seen | None:
    """Return the fault of a connection that shows at one of its ends; None if neither shows it."""
    i, j = way
    name = interface(meeting, j, address)[0]
    own, far = (end_of(meeting, index, address, name) for index in (j, i))
    if name.startswith(VIRTUAL) or i in with_address(meeting, j, address):
        return "choice", j, own
    # An own end counts as without an address if it has only a link-local one.
    for node, end in ((j, own), (i, far)):
        if end.state == "down" or end.state == "bare":
            return end.state, node, end
    return None
