"""Gradients that some ranks alone change after the all-reduce (DDP709)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ddpdoctor.analysis.replicas import Difference, Replica, odd, replicas
from ddpdoctor.analysis.writes import likely, on_some_ranks, ranks_of
from ddpdoctor.core.finding import Finding, Location, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.core.relations import PARAMETERS, same_subject
from ddpdoctor.run.records.model import ClipRecord, EditRecord
from ddpdoctor.run.snapshot import Run

LOOKS = 64
"""Steps at the beginning whose gradients every rank looks at; later each so many."""


R = TypeVar("R", ClipRecord, EditRecord)


@dataclass(frozen=True)
class Edit:
    """A change of gradients that some ranks alone made, and the parameters differ since."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    what: str
    """What they did, as in ``rank 1 clips its gradients``, or did not."""
    step: int
    location: Location | None
    evidence: tuple[str, ...]


@rule(
    "DDP709",
    "gradient-changed-on-one-rank",
    Severity.ERROR,
    supersedes={"DDP701": same_subject},
)
def gradient_changed_on_one_rank(run: Run) -> Iterator[Finding]:
    """Some ranks change their gradients after the all-reduce, the others do not.

    What it finds
        Parameters that differ between ranks from some step on, and in that step gradients that only
        some ranks clipped (`clip_grad_norm_`, `clip_grad_value_`) or changed between backward and
        `optimizer.step()`. If that was not observed but gradients differ, the only line that
        changes them under a condition on the rank.

    Why it is bad
        DDP makes the gradients equal. After the change each rank takes a different step, and the
        parameters stay different.

    How to fix it
        Do it on every rank: the gradients are the same there, and so is the result.

    Example
        Wrong:
            if rank == 0:
                clip_grad_norm_(ddp.parameters(), 1.0)
        Right:
            clip_grad_norm_(ddp.parameters(), 1.0)

    When it stays silent
        For changes that all ranks make, and changes that leave the parameters equal, such as
        clipping gradients that are already small. Changes other than clipping are checked in the
        first 64 steps and in every 64th step.
    """
    for replica in replicas(run):
        difference = replica.difference("parameters")
        found = _edited_alone(run, replica, difference) if difference is not None else None
        if found is None or difference is None:
            continue
        yield Finding(
            code="DDP709",
            about=f"module {replica.module}",
            subjects=frozenset((f"{PARAMETERS}{replica.module}",)),
            severity=Severity.ERROR,
            message=f"{found.what}: the parameters differ {difference.since}",
            ranks=found.ranks,
            location=found.location,
            evidence=found.evidence,
            fix="Change gradients in the same way on every rank: after DDP's all-reduce they are "
            "equal there.",
        )


def _edited_alone(run: Run, replica: Replica, difference: Difference) -> Edit | None:
    """The change of gradients by which replicas came to differ."""
    gradients = replica.values(difference.first, "gradients")
    if gradients and len(set(map(str, gradients.values()))) == 1:
        return None
    first = 0 if difference.equal is None else difference.equal + 1
    steps = range(first, difference.first + 1)
    return (
        _clipped(replica, steps)
        or _changed(run, replica, steps)
        or (_guarded(run, replica, difference) if gradients else None)
    )


def _clipped(replica: Replica, steps: range) -> Edit | None:
    """The first step in which some ranks alone called one of torch's functions."""
    for step in _turns(replica, ClipRecord, steps):
        states = {rank.rank: _state(rank.records.of(ClipRecord), step) for rank in replica.ranks}
        calls = {rank: each.call if each is not None else "" for rank, each in states.items()}
        clipping = tuple(sorted(rank for rank, call in calls.items() if call))
        rest = tuple(sorted(rank for rank, call in calls.items() if not call))
        if not clipping or not rest:
            continue
        record = states[clipping[0]]
        call, many = calls[clipping[0]], len(clipping) > 1
        return Edit(
            clipping if len(clipping) <= len(rest) else rest,
            rest,
            f"{named(clipping)} call{'' if many else 's'} {call} here and {named(rest)} "
            f"do{'es' if len(rest) == 1 else ''} not",
            step,
            record.location if record is not None else None,
            (f"the first step of that kind since the parameters were equal is step {step}",),
        )
    return None


def _changed(run: Run, replica: Replica, steps: range) -> Edit | None:
    """The first step in which some ranks changed other gradients than the others."""
    for step in _turns(replica, EditRecord, steps):
        if step >= LOOKS and step % LOOKS:
            continue
        states = {
            rank.rank: _state(
                [each for each in rank.records.of(EditRecord) if each.ddp == replica.module], step
            )
            for rank in replica.ranks
        }
        counts = {rank: each.count if each is not None else 0 for rank, each in states.items()}
        if len(set(counts.values())) == 1:
            continue
        most = max(counts.values())
        lines = on_some_ranks(run, "gradients")
        guilty = odd(counts) or tuple(rank for rank in sorted(counts) if counts[rank] == most)
        others = tuple(rank for rank in sorted(counts) if rank not in guilty)
        edited = states[guilty[0]]
        names = ", ".join(edited.names) if edited is not None else ""
        looked = ", ".join(
            f"{count} changed on rank {rank}" for rank, count in sorted(counts.items())[:4]
        )
        verb = "changes its" if len(guilty) == 1 else "change their"
        return Edit(
            guilty,
            others,
            f"{named(guilty)} {verb} gradients between backward and optimizer.step() otherwise "
            f"than {named(others)}",
            step,
            _only(replica, guilty, lines),
            (
                f"of the gradients looked at in step {step}: {looked}"
                + (f" ({names})" if names else ""),
                *likely(lines, "gradients"),
            ),
        )
    return None


def _guarded(run: Run, replica: Replica, difference: Difference) -> Edit | None:
    """The only line that can be it, where gradients differ and no change of them was seen."""
    lines = on_some_ranks(run, "gradients")
    if len(lines) != 1:
        return None
    everyone = tuple(sorted(replica.prints))
    guilty = replica.odd(difference.first, "gradients") or ranks_of(run, lines)
    return Edit(
        guilty or everyone,
        (),
        "gradients differ between ranks when the optimizer uses them, and this line, which some "
        "ranks alone run, is likely what changes them",
        difference.first,
        lines[0],
        (f"gradients differ in step {difference.first}", *likely(lines, "gradients")),
    )


def _only(replica: Replica, guilty: tuple[int, ...], lines: list[Location]) -> Location | None:
    member = next(rank for rank in replica.ranks if rank.rank in guilty)
    return lines[0] if len(lines) == 1 else member.site("optimizer")


def _turns(replica: Replica, declared: type[ClipRecord | EditRecord], steps: range) -> list[int]:
    """The steps in which the ranks may have begun to do other things than each other."""
    seen = {record.step for rank in replica.ranks for record in rank.records.of(declared)}
    return sorted({*steps[:1], *(step for step in seen if step in steps)})


def _state(records: Sequence[R], step: int) -> R | None:
    """What a rank did in a step: it writes when that becomes another thing."""
    return next((each for each in reversed(records) if each.step <= step), None)
