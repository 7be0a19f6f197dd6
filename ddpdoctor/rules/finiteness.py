"""Numbers that are no numbers any more (DDP706): who had the first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

from ddpdoctor.analysis.arithmetic import MOST, lines_of
from ddpdoctor.analysis.places import quoted
from ddpdoctor.analysis.replicas import Replica, replicas
from ddpdoctor.core.finding import Finding, Location, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.run.records.model import NonfiniteGradientRecord, NonfiniteRecord, Origin
from ddpdoctor.run.snapshot import Rank, Run

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
    lines = _lines(root, member) if root and not root.within else []
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
        fix=_fix(root),
    )


def _whose(run: Run, ranks: tuple[int, ...]) -> str:
    return "every rank" if len(ranks) == len(run.last) > 1 else named(ranks)


def _candidates(lines: list[Location]) -> Iterator[str]:
    if len(lines) > 1:
        yield f"{'either' if len(lines) == 2 else 'any'} of these lines may be it"


def _lines(origin: Origin, member: Rank) -> list[Location]:
    """The lines of the job's own arithmetic that may be it; none if they are too many."""
    found = lines_of(
        origin.operations,
        member.site("forward"),
        member.site("backward"),
        origin.order,
        constant=origin.what == "input",
    )
    return found if len(found) <= MOST else []


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


def _fix(origin: Origin | None) -> str:
    if origin is not None and origin.what == "input":
        return (
            "Look for it in this rank's samples of this step and in how they are loaded and "
            "normalized; skip a bad batch on all ranks together."
        )
    return (
        "Look at this rank's samples of this step and at divisions, logarithms and roots in "
        "the loss; skip a bad batch on all ranks together."
    )


R = TypeVar("R", NonfiniteRecord, NonfiniteGradientRecord)


def _since(run: Run, declared: type[R], clean: int) -> dict[int, R]:
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
