"""Evidence that replicas differ: since when, in which tensors, and by how much."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.analysis.replicas import Difference, Replica
from ddpdoctor.core.ranks import named
from ddpdoctor.run.snapshot import Rank


def member(replica: Replica, guilty: tuple[int, ...]) -> Rank:
    """One of the guilty ranks, or any if none is."""
    return next((rank for rank in replica.ranks if rank.rank in guilty), replica.ranks[0])


def bounds(replica: Replica, difference: Difference) -> Iterator[str]:
    """Between which steps they became different, and how many fingerprints show it."""
    if difference.equal is not None:
        yield f"equal after step {difference.equal}, different after step {difference.first}"
    yield (
        f"{difference.seen} fingerprints show it, the last of step {replica.steps[-1]} "
        f"({replica.type}, {len(replica.names)} parameters)"
    )


def tensors(replica: Replica, difference: Difference) -> Iterator[str]:
    """Which tensors differ, and how far their elements differ, or else their norms."""
    found = next(replica.rich(difference.first), None)
    if found is None:
        return
    step, details = found
    everyone = sorted(details)
    length = min(len(each) for each in details.values())
    differing = [
        index
        for index in range(min(length, len(replica.names)))
        if len({details[rank][index][0] for rank in everyone}) > 1
    ]
    if not differing:
        return
    yield f"{len(differing)} of {len(replica.names)} tensors differ after step {step}"
    distances = {each.name: each for each in replica.distances if each.most and each.step >= step}
    names = {replica.names[index] for index in differing[:3]}
    for each in [*distances.values()][:3]:
        names.discard(each.name)
        looked = (
            f"all {each.count:,} elements"
            if each.looked == each.count
            else f"{each.looked:,} elements looked at (of {each.count:,})"
        )
        yield (
            f"{each.name}: max difference {each.most:.3g} after step {each.step} between "
            f"{named(each.ranks)}, of {looked}"
        )
    for index in (each for each in differing[:3] if replica.names[each] in names):
        norms = [details[rank][index][1] for rank in everyone]
        listed = ", ".join(
            f"{norm:.6g} on rank {rank}"
            for rank, norm in list(zip(everyone, norms, strict=True))[:4]
        )
        yield f"{replica.names[index]}: norm {listed}"


def shown(value: object) -> str:
    """A hyper-parameter or a scale, as it is printed."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
