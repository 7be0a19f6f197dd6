"""Numbers that are no numbers any more (DDP706): who had the first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ddpdoctor.analysis.arithmetic import MOST, lines_of
from ddpdoctor.analysis.hang_snapshot import quoted
from ddpdoctor.analysis.replicas import Replica, list_of, replicas, site
from ddpdoctor.core.finding import Finding, Location, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.run.record import Record, integer
from ddpdoctor.run.snapshot import Rank, Run

LASTING = 3
"""Steps on end with losses that are not finite, on all ranks, which tell that it stays so."""


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
    first = _since(run, "nonfinite", clean)
    gradients = _since(run, "nonfinite_gradient", clean)
    over = run.exit_status is not None or all(rank.ended for rank in run.last)
    spread = any(record.get("spread") for record in (*first.values(), *gradients.values()))
    lasting = first and all(_lasting(rank, clean) for rank in run.last)
    if before is None and not (spread or lasting):
        return
    if not over and len(first) < len(run.last):
        # The one that was first may not have written it yet.
        return
    step = min((integer(record, "step") for record in first.values()), default=1 << 62)
    burst = min((integer(record, "step") for record in gradients.values()), default=1 << 62)
    if burst < step and (before is None or burst <= before[0]):
        yield _overflow(run, burst, gradients, before)
        return
    if before is not None and before[0] < step:
        yield _parameters(run, *before)
        return
    guilty = tuple(
        sorted(rank for rank, record in first.items() if integer(record, "step") == step)
    )
    everyone = len(guilty) == len(run.last)
    value = first[guilty[0]].get("loss")
    origin = first[guilty[0]].get("origin") or {}
    root = origin.get("infinite") or origin
    later = [rank for rank in sorted(first) if rank not in guilty]
    member = next(rank for rank in run.last if rank.rank == guilty[0])
    whose = "every rank" if everyone and len(guilty) > 1 else named(guilty)
    backward = site(member, "backward")
    own = root and not root.get("within")
    lines = _lines(root, member) if own else []
    began = f" in {' or in '.join(map(quoted, lines))}" if lines else _place(root)
    yield Finding(
        code="DDP706",
        about="not finite",
        severity=Severity.ERROR,
        message=f"the loss of {whose} is {value} at step {step}"
        + ("" if everyone else ", before any other rank's")
        + (f"; it began{began}" if began else ""),
        ranks=guilty,
        location=lines[0] if lines else backward,
        evidence=(
            *(["either of these lines may be it"] if len(lines) == 2 else []),
            *(["any of these lines may be it"] if len(lines) > 2 else []),
            *(
                f"rank {rank}: {first[rank].get('loss')} from step {integer(first[rank], 'step')} "
                "on, after the all-reduce"
                for rank in later[:4]
            ),
            *((_origin(origin, str(value)),) if origin else ()),
            *((_tensors(*before),) if before is not None else ()),
        ),
        fix=_mending(root),
    )


def _lines(origin: Record, member: Rank) -> list[Location]:
    """The lines of the job's own arithmetic that may be it; none if they are too many."""
    names = [str(name) for name in list_of(origin, "operations")]
    order = list_of(origin, "order")
    found = lines_of(
        names,
        site(member, "forward"),
        site(member, "backward"),
        (order[0], order[1]) if len(order) == 2 else None,
        constant=origin.get("what") == "input",
    )
    return found if len(found) <= MOST else []


def _place(origin: Record) -> str:
    """The module where it began: ``in module fc``."""
    module = origin.get("module")
    if module is None:
        return ""
    name = f"module {module}" if module else "the model itself"
    return f" in {name}" if origin.get("within") else f" behind {name}"


def _origin(origin: Record, value: str) -> str:
    """Where in the forward pass the loss became what it is."""
    names = [str(name) for name in origin.get("operations") or ["an operation"]]
    if origin.get("what") == "input":
        return f"what enters {names[0]}{_place(origin)} holds {value}: a batch, or a constant"
    if origin.get("what") == "parameter":
        return f"a parameter{_place(origin)} is not finite when {names[0]} uses it"
    source = origin.get("infinite")
    if source:
        through = f"{value} came out of {names[0]}, and what entered it was infinite already"
        return f"{through}: {_origin(source, 'infinite value')}"
    ways = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
    return f"the first {value} came out of {ways}{_place(origin)}"


def _mending(origin: Record) -> str:
    if origin.get("what") == "input":
        return (
            "Look for it in this rank's samples of this step and in how they are loaded and "
            "normalized; skip a bad batch on all ranks together."
        )
    return (
        "Look at this rank's samples of this step and at divisions, logarithms and roots in "
        "the loss; skip a bad batch on all ranks together."
    )


def _since(run: Run, kind: str, clean: int) -> dict[int, Record]:
    """Each rank's first record of a kind after the step that is known to have been harmless."""
    return {
        rank.rank: record
        for rank in run.last
        for record in reversed(list(rank.of_kind(kind)))
        if integer(record, "step") > clean
    }


def _overflow(
    run: Run,
    step: int,
    gradients: dict[int, Record],
    before: tuple[int, Replica, list[str]] | None,
) -> Finding:
    guilty = tuple(rank for rank in sorted(gradients) if integer(gradients[rank], "step") == step)
    everyone = len(guilty) == len(run.last)
    whose = "every rank" if everyone and len(guilty) > 1 else named(guilty)
    names = [str(name) for name in gradients[guilty[0]].get("names", ())]
    member = next(rank for rank in run.last if rank.rank == guilty[0])
    return Finding(
        code="DDP706",
        about="not finite",
        severity=Severity.ERROR,
        message=f"the gradient of {names[0] if names else 'a parameter'} on {whose} is not finite "
        f"at step {step}, "
        + ("with finite losses" if everyone else "with a finite loss, and before any other rank's"),
        ranks=guilty,
        location=site(member, "backward"),
        evidence=(
            *(
                f"rank {rank}: the gradient of {', '.join(gradients[rank].get('names', ()))} is "
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
    steps = {integer(record, "step") for record in rank.of_kind("nonfinite")}
    return any(
        all(step + more in steps for more in range(LASTING)) for step in steps if step > clean
    )


def _clean(replica: Replica, before: tuple[int, Replica, list[str]] | None) -> int:
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


def _poisoned(replica: Replica) -> tuple[int, Replica, list[str]] | None:
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


def _parameters(run: Run, step: int, replica: Replica, names: list[str]) -> Finding:
    member = replica.ranks[0]
    many = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Finding(
        code="DDP706",
        about="not finite",
        severity=Severity.ERROR,
        message=f"parameter {names[0]}{many} is not finite after step {step}, though no loss was "
        "NaN before",
        ranks=tuple(rank.rank for rank in replica.ranks),
        location=site(member, "backward"),
        evidence=(_tensors(step, replica, names), "the losses up to this step were finite"),
        fix="The gradient was not finite, or the step too large: look for roots and divisions at "
        "zero in the backward, clip gradients, or lower the learning rate.",
    )
