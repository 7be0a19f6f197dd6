"""Rules for gradients: non-finite (DDP706), changed (DDP709), scaled by world size (DDP329)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import PARAMETERS, same_subject
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.replicas.differences import Difference, Replica, odd, replicas
from ddpdoctor.diagnose.source_files import quoted
from ddpdoctor.diagnose.source_operations import (
    MAX_CANDIDATES,
    guarded_call,
    likely_written,
    names_world_factor,
    operation_lines,
    ranks_that_write,
    reduces_gradients,
    scaled_by_world,
    scales_by_world,
    scales_near,
    written_on_some_ranks,
)
from ddpdoctor.run.records.model import (
    ClipRecord,
    DdpRecord,
    EditRecord,
    GradientScaleRecord,
    LossScaleRecord,
    NonfiniteGradientRecord,
    NonfiniteRecord,
    Origin,
)
from ddpdoctor.run.snapshot import Rank, Run

# -- values that are not finite

MIN_LASTING_STEPS = 3  # Minimum number of consecutive steps with non-finite losses on all ranks
NEVER = 1 << 62  # Greater than any step


class Poisoned(NamedTuple):
    """Parameters that are not finite."""

    step: int  # The first step after which this was observed
    replica: Replica
    names: list[str]

    @property
    def evidence(self) -> str:
        """The parameters in a sentence."""
        count = f"{len(self.names)} of {len(self.replica.names)} parameters"
        return f"{count} are not finite after step {self.step}: {', '.join(self.names[:3])}"


@rule("DDP706", "not-finite", Severity.ERROR)
def not_finite(run: Run) -> Iterator[Finding]:
    """A loss or the parameters are NaN or infinite, and training continues.

    What it finds
        The rank whose loss or gradient became NaN or infinite first, in a step that the optimizer
        took, and the parameters; or parameters that are not finite although all losses were. The
        gradient is the rank's own, before the all-reduce. For a loss, the finding names the
        operation and module where it began, or says that the batch contained it. It names up to
        three lines if the operation is in your code after the model. On a GPU, this needs torch
        2.13, and is limited to steps that the overhead budget allows.

    Why it is bad
        The all-reduce spreads one rank's NaN to the gradients and parameters of all ranks. From the
        next step on, every loss is NaN on every rank, and the origin is no longer visible.

    How to fix it
        Look at this rank's samples in this step, then at divisions, logarithms and roots in the
        loss. Skip a bad batch on all ranks together, never on one: the others would wait.

    Example
        Wrong:
            loss = errors[mask].mean()  # NaN if the mask selects nothing
        Right:
            loss = errors[mask].sum() / mask.sum().clamp(min=1)

    When it stays silent
        For steps that a GradScaler or the job skips, and for steps before the last one after which
        all parameters were finite.
    """
    found = tuple(replicas(run))
    poisoned = [each for replica in found if (each := _poisoned(replica)) is not None]
    before = min(poisoned, key=lambda each: each.step, default=None)
    clean = max((_clean(replica, before) for replica in found), default=-1)
    losses = _since(run, NonfiniteRecord, clean)
    gradients = _since(run, NonfiniteGradientRecord, clean)
    if before is None and not _did_harm(run, losses, gradients, clean):
        return
    if not run.over and len(losses) < len(run.last):
        # The first rank may not have written its record yet.
        return
    step = min((record.step for record in losses.values()), default=NEVER)
    burst = min((record.step for record in gradients.values()), default=NEVER)
    if burst < step and (before is None or burst <= before.step):
        yield _gradient_finding(run, burst, gradients, before)
    elif before is not None and before.step < step:
        yield _parameter_finding(before)
    else:
        yield _loss_finding(run, step, losses, before)


def _did_harm(
    run: Run,
    losses: dict[int, NonfiniteRecord],
    gradients: dict[int, NonfiniteGradientRecord],
    clean: int,
) -> bool:
    """Return whether losses or gradients show that parameters are not finite."""
    if any(each.spread for found in (losses, gradients) for each in found.values()):
        return True
    return bool(losses) and all(_lasts(rank, clean) for rank in run.last)


def _loss_finding(
    run: Run, step: int, losses: dict[int, NonfiniteRecord], before: Poisoned | None
) -> Finding:
    guilty = tuple(rank for rank in sorted(losses) if losses[rank].step == step)
    first, member = losses[guilty[0]], run.rank(guilty[0])
    origin = first.origin
    root = origin and (origin.infinite or origin)
    lines = _candidate_lines(root, member) if root and not root.within else []
    began = f" in {' or in '.join(map(quoted, lines))}" if lines else _place(root)
    later = [rank for rank in sorted(losses) if rank not in guilty]
    evidence = []
    if len(lines) > 1:
        evidence.append(f"{'either' if len(lines) == 2 else 'any'} of these lines may be it")
    evidence += [
        f"rank {rank}: {losses[rank].loss} from step {losses[rank].step} on, after the all-reduce"
        for rank in later[:4]
    ]
    if origin:
        evidence.append(_origin(origin, first.loss))
    look = "samples of this step and at divisions, logarithms and roots in the loss"
    if root and root.what == "input":
        look = "samples of this step, at how they are loaded, and at how they are normalized"
    return _nonfinite(
        run,
        f"the loss of {_whose(run, guilty)} is {first.loss} at step {step}"
        + ("" if len(guilty) == len(run.last) else ", before any other rank's")
        + (f"; it began{began}" if began else ""),
        guilty,
        evidence,
        f"Look at this rank's {look}; skip a bad batch on all ranks together.",
        before,
        lines[0] if lines else None,
    )


def _nonfinite(
    run: Run,
    message: str,
    ranks: tuple[int, ...],
    evidence: list[str],
    fix: str,
    before: Poisoned | None,
    location: Location | None = None,
) -> Finding:
    return Finding(
        code="DDP706",
        about="not finite",
        severity=Severity.ERROR,
        message=message,
        ranks=ranks,
        location=location or run.rank(ranks[0]).site("backward"),
        evidence=(*evidence, *((before.evidence,) if before is not None else ())),
        fix=fix,
    )


def _whose(run: Run, ranks: tuple[int, ...]) -> str:
    return "every rank" if len(ranks) == len(run.last) > 1 else named(ranks)


def _candidate_lines(origin: Origin, member: Rank) -> list[Location]:
    """Return the lines of the job that may be the origin, if they are few."""
    found = operation_lines(
        origin.operations,
        member.site("forward"),
        member.site("backward"),
        origin.order,
        constant=origin.what == "input",
    )
    return found if len(found) <= MAX_CANDIDATES else []


def _place(origin: Origin | None) -> str:
    """Name the module of the origin: ``in module fc``."""
    if origin is None or origin.module is None:
        return ""
    name = f"module {origin.module}" if origin.module else "the model itself"
    return f" in {name}" if origin.within else f" behind {name}"


def _origin(origin: Origin, value: str) -> str:
    """Describe where in the forward the loss stopped being finite."""
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


Nonfinite = TypeVar("Nonfinite", NonfiniteRecord, NonfiniteGradientRecord)


def _since(run: Run, declared: type[Nonfinite], clean: int) -> dict[int, Nonfinite]:
    """Return each rank's first record of a class after the last step known to be harmless."""
    return {
        rank.rank: record
        for rank in run.last
        for record in reversed(rank.records.of(declared))
        if record.step > clean
    }


def _gradient_finding(
    run: Run, step: int, gradients: dict[int, NonfiniteGradientRecord], before: Poisoned | None
) -> Finding:
    guilty = tuple(rank for rank in sorted(gradients) if gradients[rank].step == step)
    names = gradients[guilty[0]].names
    others = "with a finite loss, and before any other rank's"
    return _nonfinite(
        run,
        f"the gradient of {names[0] if names else 'a parameter'} on {_whose(run, guilty)} is not "
        f"finite at step {step}, "
        + ("with finite losses" if len(guilty) == len(run.last) else others),
        guilty,
        [
            f"rank {rank}: the gradient of {', '.join(gradients[rank].names)} is "
            "not finite before the all-reduce"
            for rank in guilty[:4]
        ],
        f"Look for roots, norms and divisions at zero behind {names[0] if names else 'it'}: "
        "their backward is infinite where their result is not. Clip gradients, or add an epsilon.",
        before,
    )


def _lasts(rank: Rank, clean: int) -> bool:
    """Return whether losses were non-finite in consecutive steps. Then the parameters are, too."""
    steps = {record.step for record in rank.records.of(NonfiniteRecord)}
    return any(
        all(step + more in steps for more in range(MIN_LASTING_STEPS))
        for step in steps
        if step > clean
    )


def _clean(replica: Replica, before: Poisoned | None) -> int:
    """Return the last step after which all parameters were finite; -1 if none is known."""
    return max(
        (
            step
            for step, details in replica.rich()
            if (before is None or step < before.step)
            and all(math.isfinite(norm) for tensors in details.values() for _, norm in tensors)
        ),
        default=-1,
    )


def _poisoned(replica: Replica) -> Poisoned | None:
    """Return the parameters that were first seen to be not finite."""
    for step, details in replica.rich():
        tensors = next(iter(details.values()))
        names = [
            name
            for name, (_, norm) in zip(replica.names, tensors, strict=False)
            if not math.isfinite(norm)
        ]
        if names:
            return Poisoned(step, replica, names)
    return None


def _parameter_finding(found: Poisoned) -> Finding:
    many = f" and {len(found.names) - 1} more" if len(found.names) > 1 else ""
    return Finding(
        code="DDP706",
        about="not finite",
        severity=Severity.ERROR,
        message=f"parameter {found.names[0]}{many} is not finite after step {found.step}, though "
        "no loss was NaN before",
        ranks=tuple(rank.rank for rank in found.replica.ranks),
        location=found.replica.ranks[0].site("backward"),
        evidence=(found.evidence, "the losses up to this step were finite"),
        fix="The gradient was not finite, or the step too large: look for roots and divisions at "
        "zero in the backward, clip gradients, or lower the learning rate.",
    )


# -- gradients that only some ranks change after the all-reduce

CHECKED_STEPS = 64
"""Number of first steps in which each rank checks its gradients for changes. Then every 64th."""

Change = TypeVar("Change", ClipRecord, EditRecord)


@dataclass(frozen=True)
class Edit:
    """A change of gradients on some ranks only that made the parameters differ."""

    ranks: tuple[int, ...]
    what: str  # The action of the ranks: ``rank 1 clips its gradients``
    location: Location | None
    evidence: tuple[str, ...]


@rule("DDP709", "gradient-changed-on-one-rank", Severity.ERROR, supersedes={"DDP701": same_subject})
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
        clipping gradients that are already small. Changes other than clipping are looked for in the
        first 64 steps and in every 64th step.
    """
    for replica in replicas(run):
        difference = replica.difference("parameters")
        if difference is None:
            continue
        gradients = replica.values(difference.first, "gradients")
        if gradients and len(set(map(str, gradients.values()))) == 1:
            continue
        first = 0 if difference.equal is None else difference.equal + 1
        steps = range(first, difference.first + 1)
        found = (
            _clipped(run, replica, steps)
            or _changed(run, replica, steps)
            or (_guarded(run, replica, difference) if gradients else None)
        )
        if found is None:
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


def _clipped(run: Run, replica: Replica, steps: range) -> Edit | None:
    """Return the first step in which only some ranks called one of torch's clipping functions."""
    for step, states in _states(replica, ClipRecord, steps):
        clipping = tuple(rank for rank, each in states.items() if each is not None and each.call)
        rest = tuple(rank for rank in states if rank not in clipping)
        record = states[clipping[0]] if clipping else None
        if record is None or not rest:
            continue
        location, called = guarded_call(run, record.location)
        return Edit(
            clipping if len(clipping) <= len(rest) else rest,
            f"{named(clipping)} call{'' if len(clipping) > 1 else 's'} {record.call} here and "
            f"{named(rest)} do{'es' if len(rest) == 1 else ''} not",
            location,
            (
                f"the first step of that kind since the parameters were equal is step {step}",
                *called,
            ),
        )
    return None


def _changed(run: Run, replica: Replica, steps: range) -> Edit | None:
    """Return the first step in which some ranks changed other gradients than the rest."""
    for step, states in _states(replica, EditRecord, steps):
        counts = {rank: each.count if each is not None else 0 for rank, each in states.items()}
        if (step >= CHECKED_STEPS and step % CHECKED_STEPS) or len(set(counts.values())) == 1:
            continue
        most = max(counts.values())
        guilty = odd(counts) or tuple(rank for rank in counts if counts[rank] == most)
        others = [rank for rank in counts if rank not in guilty]
        edited = states[guilty[0]]
        names = f" ({', '.join(edited.names)})" if edited is not None and edited.names else ""
        looked = ", ".join(
            f"{count} changed on rank {rank}" for rank, count in list(counts.items())[:4]
        )
        verb = "changes its" if len(guilty) == 1 else "change their"
        lines = written_on_some_ranks(run, "gradients")
        member = next(rank for rank in replica.ranks if rank.rank in guilty)
        return Edit(
            guilty,
            f"{named(guilty)} {verb} gradients between backward and optimizer.step() otherwise "
            f"than {named(others)}",
            lines[0] if len(lines) == 1 else member.site("optimizer"),
            (
                f"of the gradients looked at in step {step}: {looked}{names}",
                *likely_written(lines, "gradients"),
            ),
        )
    return None


def _guarded(run: Run, replica: Replica, difference: Difference) -> Edit | None:
    """Return the only possible line if gradients differ and no change was observed."""
    lines = written_on_some_ranks(run, "gradients")
    if len(lines) != 1:
        return None
    guilty = replica.odd(difference.first, "gradients") or ranks_that_write(run, lines)
    return Edit(
        guilty or tuple(sorted(replica.prints)),
        "gradients differ between ranks when the optimizer uses them, and this line, which only "
        "some ranks run, likely changes them",
        lines[0],
        (f"gradients differ in step {difference.first}", *likely_written(lines, "gradients")),
    )


def _states(
    replica: Replica, declared: type[Change], steps: range
) -> Iterator[tuple[int, dict[int, Change | None]]]:
    """Yield the steps in which ranks may have begun to differ, with each rank's newest record.

    A rank writes a record when its behavior changes.
    """
    if not all(rank.watched(declared) for rank in replica.ranks):
        return
    written: dict[int, Sequence[Change]] = {
        rank.rank: rank.records.of(declared)
        for rank in sorted(replica.ranks, key=lambda each: each.rank)
    }
    turns: set[int] = {record.step for records in written.values() for record in records}
    for step in sorted({*steps[:1], *turns.intersection(steps)}):
        states = {
            rank: next(
                (
                    each
                    for each in reversed(records)
                    if each.step <= step and getattr(each, "ddp", replica.module) == replica.module
                ),
                None,
            )
            for rank, records in written.items()
        }
        yield step, states


# -- gradients scaled by the number of ranks

SCALE_ERROR = 1e-3


@rule("DDP329", "scaled-by-world-size", Severity.WARNING)
def scaled_by_world_size(run: Run) -> Iterator[Finding]:
    """Gradients are divided or multiplied by the number of ranks, although DDP averages them.

    What it finds
        A backward through a loss that `dist.all_reduce` has summed and that is divided by the world
        size, a loss that is divided by it before backward, or gradients that the job multiplies by
        it or its inverse between backward and `optimizer.step()`. Without DDP: gradients that the
        job sums over the ranks while no line divides by the world size. If the loss is all-reduced
        but not divided: information, because torch is going to forbid it.

    Why it is bad
        `dist.all_reduce` has no gradient: autograd passes through it as if it were not there. DDP
        divides by the world size itself. So the gradients are divided twice, and the effective
        learning rate is too small by a factor of the world size.

    How to fix it
        Call backward on the local loss, and reduce a detached copy for the log.

    Example
        Wrong:
            dist.all_reduce(loss)
            (loss / world_size).backward()
        Right:
            loss.backward()
            shown = loss.detach().clone()
            dist.all_reduce(shown)

    When it stays silent
        If backward does not start at the reduced tensor, for collectives of
        `torch.distributed.nn.functional`, and if no line names the world size. For gradients
        accumulated over several backwards.
    """
    if run.world_size < 2:
        return
    losses = [(rank.rank, each) for rank in run.last for each in rank.records.of(LossScaleRecord)]
    reduced = [(rank, each) for rank, each in losses if each.call]
    if reduced:
        yield _reduced_loss(run, tuple(rank for rank, _ in reduced), reduced[0][1])
    elif losses and (at := _loss_divided(run, losses[0][1])) is not None:
        yield _scaled(
            run,
            "the loss is divided by the number of ranks before backward, and DDP divides the "
            "gradients by it again",
            at,
            f"the loss of the first steps was multiplied by {losses[0][1].factor:.4g}",
            "Call backward on the loss as it is: DDP averages the gradients.",
        )
    summed = _only_summed(run)
    if summed is not None:
        yield _scaled(
            run,
            "the gradients are summed over the ranks, and nothing divides them by their number",
            summed,
            "no line of the job scales anything by the number of ranks",
            "Divide the gradients by dist.get_world_size(), or let DDP average them.",
        )
    for rank in run.last:
        for record in rank.records.of(GradientScaleRecord):
            found = _gradient_scale(run, record)
            if found is not None:
                yield found
                return


def _only_summed(run: Run) -> Location | None:
    """Return the line that sums gradients in a job without DDP that never divides them."""
    bare = all(r.watched(DdpRecord) and not r.records.of(DdpRecord) for r in run.last)
    at = reduces_gradients(run) if bare else None
    divided = at is None or names_world_factor(run) or scales_near(at)
    return at if at is not None and not divided and _has_reduced(run, at) else None


def _has_reduced(run: Run, at: Location) -> bool:
    """Return whether each rank's last calls include a sum at a line."""
    return run.exit_status == 0 and all(
        rank.ring is not None
        and any(
            each.site == str(at) and each.name == "all_reduce" and each.reduce == "SUM"
            for each in rank.ring.collectives
        )
        for rank in run.last
    )


def _loss_divided(run: Run, record: LossScaleRecord) -> Location | None:
    """Return the line between forward and backward that divides a loss by the world size."""
    member, backward = run.last[0], record.location
    lines = operation_lines(("div", "mul"), member.site("forward"), backward)
    within = [each for each in lines if scales_by_world(each, "loss")]
    if backward is not None and scales_by_world(backward, "loss"):
        within.append(backward)
    return within[0] if within else None


def _reduced_loss(run: Run, ranks: tuple[int, ...], record: LossScaleRecord) -> Finding:
    divided = abs(record.factor * run.world_size - 1) < SCALE_ERROR
    message = f"backward runs through {record.call}, which has no gradient"
    if divided:
        message += f": each rank's gradient is divided by {run.world_size} twice"
    return Finding(
        code="DDP329",
        severity=Severity.WARNING if divided else Severity.INFO,
        message=message,
        ranks=ranks,
        location=record.location,
        evidence=(
            f"the loss of step {record.step} was reduced in place here, and then multiplied by "
            f"{record.factor:.4g} before backward",
            "DDP averages the gradients over the ranks as well",
            'torch warns: "an autograd kernel was not registered to the Autograd key(s)"',
        ),
        fix="Call backward on the local loss, and reduce a detached copy for the log: "
        "loss.detach().clone().",
        about="loss scale",
    )


def _gradient_scale(run: Run, record: GradientScaleRecord) -> Finding | None:
    world, first = run.world_size, record.factors[0] if record.factors else 1.0
    if any(abs(each / first - 1) > SCALE_ERROR for each in record.factors if first):
        return None
    seen = (
        f"the gradient of {record.name} was multiplied by {first:.4g} before the optimizer's step"
    )
    if abs(first * world - 1) < SCALE_ERROR and (at := scaled_by_world(run, "grad")) is not None:
        return _scaled(
            run,
            "the gradients that DDP has averaged are divided by the number of ranks again",
            at,
            seen,
            "Leave the division out: DDP averages the gradients.",
        )
    if abs(first / world - 1) < SCALE_ERROR:
        at = reduces_gradients(run) or scaled_by_world(run, "grad")
        if at is not None:
            return _scaled(
                run,
                "the gradients that DDP has averaged are summed over the ranks again",
                at,
                seen,
                "Leave the sum out: DDP averages the gradients.",
            )
    return None


def _scaled(run: Run, message: str, at: Location, seen: str, fix: str) -> Finding:
    return Finding(
        code="DDP329",
        severity=Severity.WARNING,
        message=message,
        ranks=tuple(rank.rank for rank in run.last),
        location=at,
        evidence=(seen, f"there are {run.world_size} ranks"),
        fix=fix,
        about="gradient scale",
    )
