"""What all checks across nodes share: the meeting, and words for nodes and ways between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Literal

from ddpdoctor.preflight.check import Outcome, Run, Status, check, could_not_run, skipped
from ddpdoctor.preflight.protocol.addresses import is_loopback
from ddpdoctor.preflight.protocol.meet import Meeting, meeting_of
from ddpdoctor.preflight.protocol.pairs import Dialled
from ddpdoctor.preflight.protocol.report import (
    Facts,
)
from ddpdoctor.preflight.situation import ATTENDANCE, Situation

LIMIT = 3600.0
"""Seconds: the meeting has its own limits, and ``--timeout`` above them."""


def across_nodes(name: str, code: str) -> Callable[[Callable[[Meeting], Outcome]], Run]:
    """Register a check that judges the meeting of all nodes, and needs another node to be there."""

    def register(of: Callable[[Meeting], Outcome]) -> Run:
        @check(name, code, scope="nodes", limit=LIMIT)
        @wraps(of)
        def run(situation: Situation) -> Outcome:
            return _judged(situation, of)

        return run

    return register


def _judged(situation: Situation, of: Callable[[Meeting], Outcome]) -> Outcome:
    meeting = meeting_of(situation)
    checked = situation.chosen is None or ATTENDANCE in situation.chosen
    # Without that check, a test of nothing would look like a good one.
    untested = skipped if checked else could_not_run
    if meeting.problem is not None:
        return untested("this node did not meet the others")
    if len(meeting.nodes) < 2:
        return untested("no other node is here")
    outcome = of(meeting)
    if not checked and outcome.status is Status.PASS and len(meeting.nodes) < meeting.expected:
        return could_not_run(f"{of_all(meeting)} are here: {outcome.detail}")
    return outcome


def of_all(meeting: Meeting) -> str:
    """How many of the expected nodes something was tested on."""
    return f"{len(meeting.nodes)} of {meeting.expected} nodes"


def grouped(meeting: Meeting, of: Callable[[Facts], str]) -> dict[str, list[int]]:
    """The nodes by a value; those for which it is empty are left out."""
    found: dict[str, list[int]] = {}
    for index, node in enumerate(meeting.nodes):
        value = of(node.facts)
        if value:
            found.setdefault(value, []).append(index)
    return found


def usual_of(groups: Mapping[str, Sequence[int]]) -> str:
    """The value that most nodes have; of equals, that of the first node."""
    return min(groups, key=lambda value: (-len(groups[value]), groups[value][0]))


Way = tuple[int, int]
"""From a node to another, by index."""


@dataclass(frozen=True)
class Blame:
    """What a set of bad ways has in common.

    Attributes:
        kind: ``into``: all ways to the node are bad; ``out of``: all from it; ``both``; or
            ``way``: one way from a node to another; ``between``: both ways between two nodes.
        node: The node; for ``way`` and ``between`` where the first way leads to.
        ways: The bad ways that this explains.
    """

    kind: Literal["into", "out of", "both", "way", "between"]
    node: int
    ways: tuple[Way, ...]

    @property
    def about(self) -> str:
        """What makes it the same finding on every node."""
        return f"{self.kind} {self.ways[0]}"

    def words(self, meeting: Meeting, into: str, out: str, both: str) -> str:
        """The ways for a person.

        Args:
            meeting: For the names of the nodes.
            into: The words before a node that all ways lead to.
            out: The same for a node that they start from.
            both: The same for both.
        """
        node = meeting.name(self.node)
        source, target = (meeting.name(index) for index in self.ways[0])
        return {
            "into": f"{into} {node}",
            "out of": f"{out} {node}",
            "both": f"{both} {node}",
            "between": f"between {source} and {target}",
            "way": f"from {source} to {target}",
        }[self.kind]

    @property
    def guilty(self) -> bool:
        """Whether it is one node's fault, and not that of a way between two."""
        return self.kind in ("into", "out of", "both")

    def hosts(self, meeting: Meeting) -> str:
        """The host names of the nodes to look at."""
        host = meeting.host(self.node)
        other = meeting.host(self.ways[0][0])
        return f"{other} and {host}" if self.kind == "between" else host


def blame(bad: Iterable[Way], tested: Iterable[Way]) -> list[Blame]:
    """Whom to blame: a node whose whole column or row is bad, else each way by itself.

    With two nodes a row is a column is a way, so it is reported as a way.
    """
    left = set(bad)
    into: dict[int, set[Way]] = {}
    out: dict[int, set[Way]] = {}
    for way in tested:
        out.setdefault(way[0], set()).add(way)
        into.setdefault(way[1], set()).add(way)
    all_bad = frozenset(left)
    found = []

    def take(kind: Literal["into", "out of", "both"], node: int, *sets: set[Way]) -> None:
        ways = set().union(*sets)
        if all(len(each) > 1 and each <= all_bad for each in sets) and ways & left:
            found.append(Blame(kind, node, tuple(sorted(ways & left))))
            left.difference_update(ways)

    for node in sorted(into):
        take("both", node, into[node], out.get(node, set()))
    # A firewall in front of a node is likelier than one behind it: columns first.
    for node in sorted(into):
        take("into", node, into[node])
    for node in sorted(out):
        take("out of", node, out[node])
    for i, j in sorted(left):
        if (j, i) not in left:
            found.append(Blame("way", j, ((i, j),)))
        elif i < j:
            found.append(Blame("between", j, ((i, j), (j, i))))
    return found


def translated(meeting: Meeting, index: int) -> tuple[str, ...]:
    """A node's own addresses, if the one at which the others dial it is none of them; else empty.

    Then an address is translated between them: NAT, a tunnel, a load balancer, a container.
    """
    node = meeting.nodes[index]
    own = tuple(each for _, _, addresses in node.facts.interfaces for each in addresses)
    return () if is_loopback(node.address) or node.address in own else own


def with_address(meeting: Meeting, index: int, address: str) -> list[int]:
    """The other machines that have a node's address as well, as they report."""
    return [
        other
        for other, node in enumerate(meeting.nodes)
        if node.facts.machine != meeting.nodes[index].facts.machine
        and interface(meeting, other, address)[0]
    ]


def bad_ways(meeting: Meeting, kind: str) -> dict[Way, Dialled]:
    """The ways that failed twice at the addresses of a kind, with what is known of each."""
    return {(i, j): result for i, j, of, result in meeting.report.bad if of == kind}


def short_of_files(meeting: Meeting) -> set[int]:
    """The nodes that could not dial for want of a file, so that what they accept is no matter."""
    return {i for i, _, _, result in meeting.report.bad if result.outcome == "no files"}


def all_ways(meeting: Meeting) -> list[Way]:
    """Every ordered pair of nodes that were here."""
    here = [place for place, node in enumerate(meeting.nodes) if not node.lost]
    return [(i, j) for i in here for j in here if i != j]


def interface(meeting: Meeting, index: int, address: str = "") -> tuple[str, int]:
    """The name and MTU of a node's interface by its address, or by the one that others reach.

    Empty and 0 where none is known.
    """
    node = meeting.nodes[index]
    for name, mtu, addresses in node.facts.interfaces:
        if (address or node.address) in addresses:
            return name, mtu
    return "", 0
