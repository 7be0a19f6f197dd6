"""What NCCL's RAS knows of the ranks of a job, those of other nodes among them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ddpdoctor.core.opening import whole
from ddpdoctor.run.records.ras import Ras, RasCommunicator, RasDifference

NO_COUNTS = ("status", "error")
"""Differences that are none of numbers of operations."""


def unanswered(ras: Ras | None, world: int) -> frozenset[int]:
    """The ranks that do not answer."""
    return frozenset(
        each.rank for communicator in _of_all(ras, world) for each in communicator.missing
    )


def behind(
    ras: Ras | None, world: int, ranks: Collection[int], others: Collection[int]
) -> frozenset[int]:
    """The ranks that have launched less than all of the others in a communicator, and more of none.

    What the others wait in, they have not launched: NCCL does what it is given in this order.

    Args:
        ras: What RAS said.
        world: The ranks of the job.
        ranks: Those that are asked about.
        others: Ranks that wait in a collective.
    """
    found: set[int] = set()
    for communicator in _of_all(ras, world):
        counts = [each for each in communicator.differences if each.what not in NO_COUNTS]
        for rank in ranks:
            less = [_compared(each, rank, others) for each in counts]
            if -1 in less and all(each is not None and each <= 0 for each in less):
                found.add(rank)
    return frozenset(found)


def _of_all(ras: Ras | None, world: int) -> Iterator[RasCommunicator]:
    """The communicators of all ranks, in which a rank has the number that it has in the job."""
    return (each for each in (ras.communicators if ras is not None else ()) if each.size == world)


def _compared(difference: RasDifference, rank: int, others: Collection[int]) -> int | None:
    """-1 if a rank has launched fewer operations than all others, 0 if as many as one of them."""
    own = _launched(difference, rank)
    theirs = [_launched(difference, each) for each in others]
    if own is None or not theirs:
        return None
    known = [each for each in theirs if each is not None]
    if len(known) < len(theirs):
        return None
    return (own > min(known)) - (own < min(known))


def _launched(difference: RasDifference, rank: int) -> int | None:
    """How many operations a rank has launched, None if that is not known."""
    unnamed = [each for each in difference.groups if not each.ranks]
    for group in difference.groups:
        if rank in group.ranks:
            return whole(group.value, -1)
    return whole(unnamed[0].value, -1) if len(unnamed) == 1 else None
