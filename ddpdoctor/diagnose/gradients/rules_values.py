"""Rules for gradient values: not finite (DDP706), or changed on one rank alone (DDP709)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import PARAMETERS, same_subject
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.replicas.differences import Difference, Replica, odd, replicas
from ddpdoctor.diagnose.source_files import quoted
from ddpdoctor.diagnose.source_operations import (
    MAX_CANDIDATES,
    likely_written,
    operation_lines,
    ranks_that_write,
    written_on_some_ranks,
)
from ddpdoctor.run.records.model import (
    ClipRecord,
    EditRecord,
    NonfiniteGradientRecord,
    NonfiniteRecord,
    Origin,
)
from ddpdoctor.run.snapshot import Rank, Run

# -- numbers that are no numbers any more (DDP706): who had the first


LASTING = 3
"""Steps on end with losses that are not finite, on all ranks, which show that it stays so."""


NEVER = 1 << 62

Poisoned = tuple[int, Replica, list[str]]
"""The first step after which parameters are seen to be not finite, their module and names."""


@rule("DDP706", "not-finite", Severity.ERROR)
def not_finite(run: Run) -> Iterator[Finding]:
    """A loss or the parameters are NaN or infinite, and training continues.

    What it finds
        The rank whose loss or gradient became NaN or infinite first, in a step that the optimizer
        took, and the parameters; or parameters that are not finite although everything before was.
        The gradient is that of the rank alone, before the all-reduce. For a loss, also the
        operation and module where it began, or that the batch already contained it; and up to three
        lines, if the operation is in your code after the model. On a GPU, this needs torch 2.13 and
        is limited to steps that the overhead budget allows.

    Why it is bad
        The all-reduce spreads one rank's NaN to the gradients and parameters of all ranks. From the
        next step on, every loss is NaN on every rank, and the origin is no longer visible.

    How to fix it
        Look at the samples of this rank at this step, then at divisions, logarithms and roots in
        the loss. Skip a bad batch on all ranks together, never on one: the others would wait.

    Example
        Wrong:
            loss = errors[mask].mean()  # NaN if the mask selects nothing
        Right:
            loss = errors[mask].sum() / mask.sum().clamp(min=1)

    When it stays silent
        For steps that a GradScaler or the job skips, and for what came before the last step after
        which all parameters were finite.
    """
    found = tuple(replicas(run))
    poisoned = [each for replica in found if (each := _poisoned(replica)) is not None]
    before = min(poisoned, key=lambda each: each[0], default=None)
    clean = max((_clean(replica, before) for replica in found), default=-1)
    losses = _since(run, NonfiniteRecord, clean)
    gradients = _since(run, NonfiniteGradientRecord, clean)
    if before is None and not _did_harm(run, losses, gradients, clean):
        return
    if not run.over and len(losses) < len(run.last):
        # The one that was first may not have written it yet.
        return
    step = min((record.step for record in losses.values()), default=NEVER)
    burst = min((record.step for record in gradients.values()), default=NEVER)
    if burst < step and (before is None or burst <= before[0]):
        yield _overflow(run, burst, gradients, before)
    elif before is not None and before[0] < step:
        yield _parameters(*before)
    else:
        yield _loss(run, step, losses, before)


def _did_harm(
    run: Run,
    losses: dict[int, NonfiniteRecord],
    gradients: dict[int, NonfiniteGradientRecord],
    clean: int,
) -> bool:
    """Whether parameters are not finite either, as far as fingerprints do not say it."""
    if any(each.spread for found in (losses, gradients) for each in found.values()):
        return True
    return bool(losses) and all(_lasting(rank, clean) for rank in run.last)


def _loss(
    run: Run, step: int, losses: dict[int, NonfiniteRecord], before: Poisoned | None
) -> Finding:
    guilty = tuple(rank for rank in sorted(losses) if losses[rank].step == step)
    first = losses[guilty[0]]
    origin = first.origin
    root = origin and (origin.infinite or origin)
    member = run.rank(guilty[0])
    lines = _candidate_lines(root, member) if root and not root.within else []
    began = f" in {' or in '.join(map(quoted, lines))}" if lines else _place(root)
    later = [rank for rank in sorted(losses) if rank not in guilty]
    return Finding(
        code="DDP706",
        about="not finite",
        severity=Severity.ERROR,
        message=f"the loss of {_whose(run, guilty)} is {first.loss} at step {step}"
        + ("" if len(guilty) == len(run.last) else ", before any other rank's")
        + (f"; it began{began}" if began else ""),
        ranks=guilty,
        location=lines[0] if lines else member.site("backward"),
        evidence=(
            *_candidates(lines),
            *(
                f"rank {rank}: {losses[rank].loss} from step {losses[rank].step} "
                "on, after the all-reduce"
                for rank in later[:4]
            ),
            *((_origin(origin, first.loss),) if origin else ()),
            *((_tensors(*before),) if before is not None else ()),
        ),
        fix=_nonfinite_fix(root),
    )


def _whose(run: Run, ranks: tuple[int, ...]) -> str:
    return "every rank" if len(ranks) == len(run.last) > 1 else named(ranks)


def _candidates(lines: list[Location]) -> Iterator[str]:
    if len(lines) > 1:
        yield f"{'either' if len(lines) == 2 else 'any'} of these lines may be it"


def _candidate_lines(origin: Origin, member: Rank) -> list[Location]:
    """The lines of the job's own arithmetic that may be it; none if they are too many."""
    found = operation_lines(
        origin.operations,
        member.site("forward"),
        member.site("backward"),
        origin.order,
        constant=origin.what == "input",
    )
    return found if len(found) <= MAX_CANDIDATES else []


def _place(origin: Origin | None) -> str:
    """The module where it began: ``in module fc``."""
    if origin is None or origin.module is None:
        return ""
    name = f"module {origin.module}" if origin.module else "the model itself"
    return f" in {name}" if origin.within else f" behind {name}"


def _origin(origin: Origin, value: str) -> str:
    """Where in the forward pass the loss became what it is."""
    names = origin.operations or ("an operation",)
    if origin.what == "input":
        return f"what enters {names[0]}{_place(origin)} holds {value}: a batch, or a constant"
    if origin.what == "parameter":
        return f"a parameter{_place(origin)} is not finite when {names[0]} uses it"
    if origin.infinite is not None:
        through = f"{value} came out of {names[0]}, and what entered it was infinite already"
        return f"{through}: {_origin(origin.infinite, 'infinite value')}"
    ways = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
    return f"the first {value} came out of {ways}{_place(origin)}"


def _nonfinite_fix(origin: Origin | None) -> str:
    if origin is not None and origin.what == "input":
        return (
            "Look for it in this rank's samples of this step and in how they are loaded and "
            "normalized; skip a bad batch on all ranks together."
        )
    return (
        "Look at this rank's samples of this step and at divisions, logarithms and roots in "
        "the loss; skip a bad batch on all ranks together."
    )


Nonfinite = TypeVar("Nonfinite", NonfiniteRecord, NonfiniteGradientRecord)


def _since(run: Run, declared: type[Nonfinite], clean: int) -> dict[int, Nonfinite]:
    """Each rank's first record of a class after the step that is known to have been harmless."""
    return {
        rank.rank: record
        for rank in run.last
        for record in reversed(rank.records.of(declared))
        if record.step > clean
    }


def _overflow(
    run: Run,
    step: int,
    gradients: dict[int, NonfiniteGradientRecord],
    before: Poisoned | None,
) -> Finding:
    guilty = tuple(rank for rank in sorted(gradients) if gradients[rank].step == step)
    everyone = len(guilty) == len(run.last)
    names = gradients[guilty[0]].names
    what = names[0] if names else "a parameter"
    return Finding(
        code="DDP706",
        about="not finite",
        severity=Severity.ERROR,
        message=f"the gradient of {what} on {_whose(run, guilty)} is not "
        f"finite at step {step}, "
        + ("with finite losses" if everyone else "with a finite loss, and before any other rank's"),
        ranks=guilty,
        location=run.rank(guilty[0]).site("backward"),
        evidence=(
            *(
                f"rank {rank}: the gradient of {', '.join(gradients[rank].names)} is "
                "not finite before the all-reduce"
                for rank in guilty[:4]
            ),
            *((_tensors(*before),) if before is not None else ()),
        ),
        fix=f"Look for roots, norms and divisions at zero behind {names[0] if names else 'it'}: "
        "their backward is infinite where their result is not. Clip gradients, or add an epsilon.",
    )


def _lasting(rank: Rank, clean: int) -> bool:
    """Whether losses were not finite in several steps on end: the parameters are it, too."""
    steps = {record.step for record in rank.records.of(NonfiniteRecord)}
    return any(
        all(step + more in steps for more in range(LASTING)) for step in steps if step > clean
    )


def _clean(replica: Replica, before: Poisoned | None) -> int:
    """The last step after which all parameters were finite; -1 if none is known."""
    return max(
        (
            step
            for step, details in replica.rich()
            if (before is None or step < before[0])
            and all(math.isfinite(norm) for tensors in details.values() for _, norm in tensors)
        ),
        default=-1,
    )


def _poisoned(replica: Replica) -> Poisoned | None:
    """The first step after which parameters are seen to be not finite, and their names."""
    for step, details in replica.rich():
        tensors = next(iter(details.values()))
        names = [
            name
            for name, (_, norm) in zip(replica.names, tensors, strict=False)
            if not math.isfinite(norm)
        ]
        if names:
            return step, replica, names
    return None


def _tensors(step: int, replica: Replica, names: list[str]) -> str:
    listed = ", ".join(names[:3])
    count = f"{len(names)} of {len(replica.names)} parameters"
    return f"{count} are not finite after step {step}: {listed}"


def _parameters(step: int, replica: Replica, names: list[str]) -> Finding:
    member = replica.ranks[0]
    many = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Finding(
        code="DDP706",
        about="not finite",
        severity=Severity.ERROR,
        message=f"parameter {names[0]}{many} is not finite after step {step}, though no loss was "
        "NaN before",
        ranks=tuple(rank.rank for rank in replica.ranks),
        location=member.site("backward"),
        evidence=(_tensors(step, replica, names), "the losses up to this step were finite"),
        fix="The gradient was not finite, or the step too large: look for roots and divisions at "
        "zero in the backward, clip gradients, or lower the learning rate.",
    )


# -- gradients that some ranks alone change after the all-reduce (DDP709)


LOOKS = 64
"""Steps at the beginning whose gradients every rank looks at; later each so many."""


Change = TypeVar("Change", ClipRecord, EditRecord)


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
        states = {
            rank.rank: _state_at_step(rank.records.of(ClipRecord), step) for rank in replica.ranks
        }
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
            rank.rank: _state_at_step(
                [each for each in rank.records.of(EditRecord) if each.ddp == replica.module], step
            )
            for rank in replica.ranks
        }
        counts = {rank: each.count if each is not None else 0 for rank, each in states.items()}
        if len(set(counts.values())) == 1:
            continue
        most = max(counts.values())
        lines = written_on_some_ranks(run, "gradients")
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
                *likely_written(lines, "gradients"),
            ),
        )
    return None


def _guarded(run: Run, replica: Replica, difference: Difference) -> Edit | None:
    """The only line that can be it, where gradients differ and no change of them was seen."""
    lines = written_on_some_ranks(run, "gradients")
    if len(lines) != 1:
        return None
    everyone = tuple(sorted(replica.prints))
    guilty = replica.odd(difference.first, "gradients") or ranks_that_write(run, lines)
    return Edit(
        guilty or everyone,
        (),
        "gradients differ between ranks when the optimizer uses them, and this line, which some "
        "ranks alone run, is likely what changes them",
        difference.first,
        lines[0],
        (f"gradients differ in step {difference.first}", *likely_written(lines, "gradients")),
    )


def _only(replica: Replica, guilty: tuple[int, ...], lines: list[Location]) -> Location | None:
    member = next(rank for rank in replica.ranks if rank.rank in guilty)
    return lines[0] if len(lines) == 1 else member.site("optimizer")


def _turns(replica: Replica, declared: type[ClipRecord | EditRecord], steps: range) -> list[int]:
    """The steps in which the ranks may have begun to do other things than each other."""
    seen = {record.step for rank in replica.ranks for record in rank.records.of(declared)}
    return sorted({*steps[:1], *(step for step in seen if step in steps)})


def _state_at_step(records: Sequence[Change], step: int) -> Change | None:
    """What a rank did in a step: it writes when that becomes another thing."""
    return next((each for each in reversed(records) if each.step <= step), None)
