"""How far the clocks of nodes differ, estimated from the steps that all ranks end together.

An all-reduce ends on all ranks at nearly the same time, so the difference of what their clocks say
of it is the difference of the clocks. No message is sent for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank

FEWEST = 3
"""Steps that two nodes must share."""


def offsets(ranks: Sequence[Rank], steps: Mapping[int, Sequence[StepRecord]]) -> dict[str, int]:
    """How far the clock of each node is ahead of that of the first rank's, in nanoseconds.

    Ranks of one node have one clock. A node that shares too few steps is taken to be right.

    Args:
        ranks: Of one attempt.
        steps: By rank.
    """
    ends: dict[str, dict[int, list[int]]] = {}
    for rank in ranks:
        of_node = ends.setdefault(rank.opened.host, {})
        for step in steps.get(rank.rank, ()):
            of_node.setdefault(step.step, []).append(_reduced(step))
    first = ranks[0].opened.host if ranks else ""
    reference = ends.get(first, {})
    found: dict[str, int] = {}
    for node, of_node in ends.items():
        shared = [median(of_node[n]) - median(reference[n]) for n in of_node if n in reference]
        known = node != first and len(shared) >= FEWEST
        found[node] = round(median(shared)) if known else 0
    return found


def _reduced(step: StepRecord) -> int:
    """When the all-reduce of a step ended: behind it come the optimizer and the rest."""
    return step.start + step.data + step.forward + step.backward + step.wait
