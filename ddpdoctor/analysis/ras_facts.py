"""What NCCL's RAS knows of the ranks of a job, those of other nodes among them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ddpdoctor.core.opening import whole
from ddpdoctor.run.records.ras import Ras, RasCommunicator, RasDifference

NO_COUNTS = ("status", "error")
"""Differences that are not counts of operations."""


def unanswered(ras: Ras | None, world: int) -> frozenset[int]:
    """The ranks that do not answer."""
    return frozenset(
        each.rank for communicator in _of_all(ras, world) for each in communicator.missing
    )


def behind(
    ras: Ras | None, world: int, ranks: Collection[int], ahead: Mapping[int, int]
) -> frozenset[int]:
    """The ranks that have not launched a collective in which others wait.

    With NCCL these go on: what they have launched behind it does not count.

    Args:
        ras: What RAS said.
        world: The ranks of the job.
        ranks: Those that are asked about.
        ahead: The collectives that ranks which wait have launched behind that one, by rank.
    """
    differing = [
        [each for each in communicator.differences if each.what not in NO_COUNTS]
        for communicator in _of_all(ras, world)
    ]
    differing = [each for each in differing if each]
    # Of several communicators nothing says which one is the group that is waited in.
    if len(differing) != 1 or not ahead:
        return frozenset()
    return frozenset(
        rank
        for rank in ranks
        if all(_lag(differing[0], rank, other) > many for other, many in ahead.items())
    )


def _of_all(ras: Ras | None, world: int) -> Iterator[RasCommunicator]:
    """The communicators of all ranks, in which a rank has the number that it has in the job."""
    return (each for each in (ras.communicators if ras is not None else ()) if each.size == world)


def _lag(differences: Sequence[RasDifference], rank: int, other: int) -> int:
    """How many operations a rank has launched less than another; 0 if that is not known."""
    found = 0
    for each in differences:
        own, theirs = _launched(each, rank), _launched(each, other)
        if own is None or theirs is None or own > theirs:
            return 0
        found += theirs - own
    return found


def _launched(difference: RasDifference, rank: int) -> int | None:
    """How many operations a rank has launched, None if that is not known."""
    unnamed = [each for each in difference.groups if not each.ranks]
    for group in difference.groups:
        if rank in group.ranks:
            return whole(group.value, -1)
    return whole(unnamed[0].value, -1) if len(unnamed) == 1 else None
