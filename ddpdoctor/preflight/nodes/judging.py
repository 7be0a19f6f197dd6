"""What all checks across nodes share: the meeting, and words for nodes and ways between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Literal

from ddpdoctor.preflight.check import Outcome, Run, Status, check, could_not_run, skipped
from ddpdoctor.preflight.protocol.facts import Facts
from ddpdoctor.preflight.protocol.meet import Meeting, meeting_of
from ddpdoctor.preflight.situation import ATTENDANCE, Situation

LIMIT = 3600.0
"""Seconds: the meeting has limits of its own, and ``--timeout`` above them."""


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
    told = situation.chosen is None or ATTENDANCE in situation.chosen
    # Whoever left that check out would take a test of nothing for a good one.
    untested = skipped if told else could_not_run
    if meeting.problem is not None:
        return untested("this node did not meet the others")
    if len(meeting.nodes) < 2:
        return untested("no other node is here")
    outcome = of(meeting)
    if not told and outcome.status is Status.PASS and len(meeting.nodes) < meeting.expected:
        return could_not_run(f"{of_all(meeting)} are here: {outcome.detail}")
    return outcome


def counted(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


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


def blame(bad: Iterable[Way], tested: Iterable[Way]) -> list[Blame]:
    """Whom to blame: a node whose whole column or row is bad, else each way by itself.

    With two nodes a row is a column is a way, so it is told as a way.
    """
    left = set(bad)
    into: dict[int, set[Way]] = {}
    out: dict[int, set[Way]] = {}
    for way in tested:
        out.setdefault(way[0], set()).add(way)
        into.setdefault(way[1], set()).add(way)
    all_bad = frozenset(left)

    def whole(ways: set[Way]) -> bool:
        return len(ways) > 1 and ways <= all_bad

    found = []
    for node in sorted(into):
        if whole(into[node]) and whole(out.get(node, set())):
            found.append(_take("both", node, into[node] | out[node], left))
    # A firewall in front of a node is likelier than one behind it: columns first.
    for node in sorted(into):
        if whole(into[node]) and into[node] & left:
            found.append(_take("into", node, into[node], left))
    for node in sorted(out):
        if whole(out[node]) and out[node] & left:
            found.append(_take("out of", node, out[node], left))
    for i, j in sorted(left):
        if (j, i) not in left:
            found.append(Blame("way", j, ((i, j),)))
        elif i < j:
            found.append(Blame("between", j, ((i, j), (j, i))))
    return found


def _take(
    kind: Literal["into", "out of", "both"], node: int, ways: set[Way], left: set[Way]
) -> Blame:
    taken = Blame(kind, node, tuple(sorted(ways & left)))
    left -= ways
    return taken


def bad_ways(meeting: Meeting, kind: str) -> Iterator[tuple[Way, dict[str, object]]]:
    """The ways that failed twice at the addresses of a kind, with what is known of each."""
    for i, j, of, result in meeting.blob["bad"]:
        if of == kind:
            yield (i, j), result


def all_ways(meeting: Meeting) -> list[Way]:
    """Every ordered pair of nodes that were here."""
    here = [place for place, node in enumerate(meeting.nodes) if not node.lost]
    return [(i, j) for i in here for j in here if i != j]


def interface_name(meeting: Meeting, index: int) -> str:
    """The interface of a node that the others reach it by; empty if it is not known."""
    node = meeting.nodes[index]
    for name, _, addresses in node.facts.interfaces:
        if reached_at(meeting, index) in addresses:
            return name
    return ""


def reached_at(meeting: Meeting, index: int) -> str:
    """The address at which the others reach a node."""
    return meeting.nodes[index].address
