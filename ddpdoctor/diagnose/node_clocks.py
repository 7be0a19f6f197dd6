"""Estimate how far the clocks of nodes differ, from the steps that all ranks end together.

An all-reduce ends on all ranks at nearly the same time, so what their clocks say of that time
differs by the difference of the clocks. No message is sent for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank

MIN_SHARED = 3
"""Steps that two nodes must share."""


def offsets(ranks: Sequence[Rank], steps: Mapping[int, Sequence[StepRecord]]) -> dict[str, int]:
    """Return how far each node's clock is ahead of the first rank's, in nanoseconds.

    Ranks of one node have one clock. The offset of a node that shares too few steps is 0.

    Args:
        ranks: The ranks of one attempt.
        steps: Their steps, by rank.
    """
    ends: dict[str, dict[int, list[int]]] = {}
    for rank in ranks:
        of_node = ends.setdefault(rank.opened.host, {})
        for step in steps.get(rank.rank, ()):
            # The all-reduce ends before the optimizer and the rest of the step.
            reduced = step.start + step.data + step.forward + step.backward + step.wait
            of_node.setdefault(step.step, []).append(reduced)
    first = ranks[0].opened.host if ranks else ""
    reference = ends.get(first, {})
    found: dict[str, int] = {}
    for node, of_node in ends.items():
        shared = [median(of_node[n]) - median(reference[n]) for n in of_node if n in reference]
        known = node != first and len(shared) >= MIN_SHARED
        found[node] = round(median(shared)) if known else 0
    return found
