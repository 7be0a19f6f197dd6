"""Optimizer steps that some ranks alone left out, though every rank ran their backward (DDP403).

Every rank still calls the same collectives, so that nothing hangs: the replicas silently diverge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.analysis.replicas import Replica, replicas
from ddpdoctor.analysis.sources import source_of
from ddpdoctor.core.finding import Finding, Location, Severity
from ddpdoctor.core.ranks import named
from ddpdoctor.run.snapshot import Rank, Run


@dataclass(frozen=True)
class LeftOut:
    """An optimizer step that ranks left out.

    Attributes:
        step: The step that they ended one or more backwards later than the others.
        ranks: Those ranks.
        others: Those that took it.
        backwards: Backwards of that step, by rank.
        member: One of the ranks.
    """

    step: int
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    backwards: dict[int, int]
    member: Rank


def left_out(run: Run) -> Iterator[LeftOut]:
    """The first such step of each DDP module."""
    for replica in replicas(run):
        found = _first(replica)
        if found is not None and _diverged(replica, found):
            yield found


def _first(replica: Replica) -> LeftOut | None:
    """The first step that took some ranks more backwards than others."""
    counts = {
        rank.rank: {each.step: each.backwards for each in rank.steps} for rank in replica.ranks
    }
    common = set.intersection(*(set(each) for each in counts.values()))
    for step in sorted(common):
        backwards = {rank: each[step] for rank, each in counts.items()}
        least = min(backwards.values())
        if not least:
            # A step without a backward is another fault than a backward without a step.
            return None
        guilty = tuple(sorted(rank for rank, count in backwards.items() if count > least))
        if guilty:
            others = tuple(sorted(set(backwards) - set(guilty)))
            member = next(each for each in replica.ranks if each.rank in guilty)
            return LeftOut(step, guilty, others, backwards, member)
    return None


def _diverged(replica: Replica, found: LeftOut) -> bool:
    """Whether it did harm: from there on the ranks differ in reduced backwards, or in parameters.

    Backwards of a rank's own, through another model, are in neither.
    """
    prints = list(replica.prints.values())
    later = [step for step in sorted(set.intersection(*map(set, prints))) if step >= found.step]
    ahead = [
        step
        for step in later
        if _armed(replica, found.ranks[0], step) > _armed(replica, found.others[0], step)
    ]
    if ahead and ahead[0] == later[0]:
        return len(ahead) > 1 or replica.over
    difference = replica.difference("parameters")
    return difference is not None and difference.within(found.step)


def _armed(replica: Replica, rank: int, step: int) -> int:
    return replica.prints[rank][step].armed


def finding(found: LeftOut) -> Finding:
    """DDP403, in words."""
    who, others = named(found.ranks), named(found.others)
    many = len(found.ranks) > 1
    return Finding(
        code="DDP403",
        about=f"left out {found.step}",
        severity=Severity.ERROR,
        message=f"{who} alone did not step the optimizer after a backward of step {found.step}, "
        f"and {others} did: the value that decided was not reduced, and the parameters differ",
        ranks=found.ranks,
        location=_location(found.member) or found.member.site("optimizer"),
        evidence=tuple(
            f"rank {rank} had {count} backward{'' if count == 1 else 's'} in step {found.step}"
            for rank, count in sorted(found.backwards.items())[:6]
        ),
        fix=f"Reduce the value over the ranks before the comparison, so that {who} "
        f"step{'' if many else 's'} whenever {others} "
        f"do{'' if len(found.others) > 1 else 'es'}; torch.amp.GradScaler does so by itself.",
    )


def _location(rank: Rank) -> Location | None:
    """The statement between the backward and the optimizer's step that decides on it."""
    at, backward = rank.site("optimizer"), rank.site("backward")
    source = source_of(at.path) if at is not None else None
    if at is None or source is None:
        return None
    loops = source.around(at.line)
    if not loops:
        return None
    conditions = source.conditions(at.line, loops[0])
    if conditions:
        return Location(at.path, conditions[0].lineno)
    after = backward.line if backward is not None and backward.path == at.path else 0
    skips = [each for each in source.skips(loops[0]) if after < each.lineno < at.line]
    return Location(at.path, skips[0].lineno) if len(skips) == 1 else None
