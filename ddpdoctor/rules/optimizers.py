"""Optimizers and their schedulers (DDP311, DDP312, DDP324, DDP325): what they step and forget."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.rules.model import listed, place, plural
from ddpdoctor.run.record import Record, integer
from ddpdoctor.run.snapshot import Rank, Run


def _told(run: Run, kind: str) -> dict[int, tuple[list[int], Record]]:
    """By DDP module: the ranks that told of it, and the record of the lowest of them."""
    found: dict[int, tuple[list[int], Record]] = {}
    for rank in run.last:
        for record in rank.of_kind(kind):
            ranks, _ = found.setdefault(integer(record, "ddp"), ([], record))
            if rank.rank not in ranks:
                ranks.append(rank.rank)
    return found


def _unowned(run: Run, orphans: bool) -> Iterator[tuple[int, list[int], Record, list[str]]]:
    """Parameters of DDP modules that no optimizer holds and that did not change."""
    for number, (ranks, record) in sorted(_told(run, "unowned").items()):
        if record.get("unchanged") is True and bool(record.get("orphans")) is orphans:
            yield number, ranks, record, [str(name) for name in record.get("parameters") or []]


def _still(record: Record) -> str:
    first, last = (record.get("steps") or [0, 0])[:2]
    return (
        f"they got gradients, and their values were the same before step {first} and before "
        f"step {last}"
    )


@rule("DDP324", "not-in-optimizer", Severity.WARNING)
def not_in_optimizer(run: Run) -> Iterator[Finding]:
    """Trainable parameters are in no optimizer.

    What it finds
        Parameters of a DDP module that require gradients and get them, that no optimizer holds, and
        whose values did not change over ten steps.

    Why it is bad
        They are not trained. Their gradients are computed and all-reduced in every step for
        nothing.

    How to fix it
        Pass them to the optimizer. If they should not be trained, freeze them before DDP is
        created.

    Example
        Wrong: `SGD(model.head.parameters(), lr=0.1)` with an encoder that requires gradients.
        Right: `SGD(model.parameters(), lr=0.1)`, or `model.encoder.requires_grad_(False)` before
        DDP.

    When it stays silent
        For frozen parameters, for parameters that something else changes (an update by hand, a
        communication hook), and in the first dozen steps.
    """
    for number, ranks, record, names in _unowned(run, orphans=False):
        count = integer(record, "count")
        yield Finding(
            code="DDP324",
            severity=Severity.WARNING,
            message=f"{count} of {plural(integer(record, 'of'))} require gradients and are in no "
            f"optimizer, so that they never learn: {listed(names, count)}",
            ranks=tuple(ranks),
            location=place(record),
            evidence=(
                _still(record),
                f"the optimizer made here is {record.get('optimizer')}",
            ),
            fix="Give them to the optimizer, or freeze them before DDP is built, which saves their "
            "gradients and the all-reduce of these.",
            about=f"module {number}",
        )


@rule("DDP325", "optimizer-of-old-parameters", Severity.ERROR)
def optimizer_of_old_parameters(run: Run) -> Iterator[Finding]:
    """The optimizer holds parameters that the model no longer has.

    What it finds
        An optimizer with parameters that never get a gradient and belong to no DDP module, while
        parameters of the DDP module are in no optimizer and do not change: the optimizer was
        created before they were replaced.

    Why it is bad
        `optimizer.step()` updates tensors that nothing uses. The new parameters keep their initial
        values, without any error.

    How to fix it
        Create the optimizer after the last change of the model's parameters. Before or after DDP
        makes no difference: DDP keeps the parameters.

    Example
        Wrong:
            optimizer = SGD(model.parameters(), lr=0.1)
            model.fc = nn.Linear(512, 10)
        Right:
            model.fc = nn.Linear(512, 10)
            optimizer = SGD(model.parameters(), lr=0.1)

    When it stays silent
        While every trainable parameter is in an optimizer or changes by other means.
    """
    for number, ranks, record, names in _unowned(run, orphans=True):
        count, old = integer(record, "count"), integer(record, "orphans")
        yield Finding(
            code="DDP325",
            severity=Severity.ERROR,
            message=f"this optimizer holds {plural(old)} that the model no longer has, and "
            f"{count} of the model's {plural(integer(record, 'of'))} are in none: "
            f"{listed(names, count)}",
            ranks=tuple(ranks),
            location=place(record),
            evidence=(
                _still(record),
                f"{plural(old)} of {record.get('optimizer')} never got a gradient and "
                f"{'is' if old == 1 else 'are'} in no DDP module",
            ),
            fix="Make the optimizer after the model's parameters were replaced for the last time.",
            about=f"module {number}",
        )


@rule("DDP311", "optimizer-in-loop", Severity.WARNING)
def optimizer_in_loop(run: Run) -> Iterator[Finding]:
    """The optimizer or the learning-rate scheduler is re-created in every step or every epoch.

    What it finds
        Optimizers that are re-created at the same line for the same parameters, each used for one
        step or one epoch although it keeps state (momentum, Adam's moments). Schedulers of torch
        that are re-created with the same options, each of which only reaches an early part of its
        schedule.

    Why it is bad
        The optimizer's state is lost: Adam stays in its biased first step, and momentum has no
        effect. A schedule that restarts again and again never decays.

    How to fix it
        Create it once, before the loop.

    Example
        Wrong:
            for batch in loader:
                optimizer = Adam(model.parameters())
        Right:
            optimizer = Adam(model.parameters())
            for batch in loader:

    When it stays silent
        For optimizers without state (plain SGD), LBFGS, and optimizers of copies, as in
        meta-learning. By epoch: below three of them, with changed options or parameters, after
        loaded weights, for several epochs each, and where replicas are averaged, as in federated
        training. For schedulers that reach their end (warm restarts), that are given a position
        (`last_epoch`, a loaded state), or whose factor is constant (`ExponentialLR`), and for
        `LambdaLR` that is stepped more than once.
    """
    for role in ("optimizer", "scheduler"):
        told = [
            (rank.rank, record)
            for rank in run.last
            for record in rank.of_kind("remade")
            if record.get(role)
            and not (record.get("every") == "epoch" and _begins_anew(rank, record))
        ]
        if told:
            ranks = tuple(sorted({rank for rank, _ in told}))
            yield _remade(role, ranks, told[0][1])
            # A scheduler is re-created with its optimizer: one fault.
            return


def _remade(role: str, ranks: tuple[int, ...], record: Record) -> Finding:
    every = "epoch" if record.get("every") == "epoch" else "step"
    times = record.get("times")
    if role == "optimizer":
        lost = "its state is lost each time"
        seen = (
            f"{times} optimizers of the same parameters in a row by step {record.get('step')}, all "
            f"but the last stepped {'for one epoch' if every == 'epoch' else 'once'}"
        )
    else:
        lost = "its schedule begins again each time"
        of = f" of {record['end']:g}" if isinstance(record.get("end"), (int, float)) else ""
        seen = (
            f"{times} schedulers of the same optimizer and options in a row by step "
            f"{record.get('step')}; the one before the last came to position "
            f"{record.get('position')}{of}"
        )
    return Finding(
        code="DDP311",
        severity=Severity.WARNING,
        message=f"{record.get(role)} is re-created here for every {every}, and {lost}",
        ranks=ranks,
        location=place(record),
        evidence=(seen,),
        fix=f"Make the {role} once, before the loop.",
        about="remade",
    )


def _begins_anew(rank: Rank, record: Record) -> bool:
    """Whether weights were loaded or averaged meanwhile, so that the old state is of no use."""
    since = integer(record, "since")
    loads = (integer(each, "step") > since for each in rank.of_kind("load"))
    return any(loads) or any(True for _ in rank.of_kind("together"))


@rule("DDP312", "zero-grad-missing", Severity.ERROR)
def zero_grad_missing(run: Run) -> Iterator[Finding]:
    """Gradients are never set to zero.

    What it finds
        Gradients that are still there when the next backward begins, after each of an optimizer's
        steps: a watched parameter's gradient has the same norm as at the end of the step, and the
        backward adds to it.

    Why it is bad
        Each step uses the sum of all gradients since the start. The loss falls at first, then the
        steps become too large or point the wrong way. No error is raised.

    How to fix it
        Call `optimizer.zero_grad()` once per step, before the backward or after the step.

    Example
        Wrong:
            loss.backward()
            optimizer.step()
        Right:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    When it stays silent
        If gradients were ever set to zero or None, as in accumulation, if something else changes
        them between steps, and in jobs with fewer than six steps. In a running job it waits for 100
        such steps.
    """
    told: dict[tuple[str, int], list[tuple[int, Record]]] = {}
    for rank in run.last:
        for record in rank.of_kind("unzeroed"):
            key = str(record.get("path")), integer(record, "line")
            told.setdefault(key, []).append((rank.rank, record))
    for (path, line), seen in sorted(told.items()):
        if not all(_is_carried(record) for _, record in seen):
            continue
        ranks = sorted({rank for rank, _ in seen})
        first = seen[0][1]
        carried, norm = integer(first, "carried"), (first.get("after") or [0.0])[0]
        yield Finding(
            code="DDP312",
            severity=Severity.ERROR,
            message=f"the gradients of {first.get('optimizer')} are never set to zero: each "
            "backward adds to those of all steps before",
            ranks=tuple(ranks),
            location=place(first),
            evidence=(
                f"{carried} steps in a row by step {first.get('step')} whose gradients were still "
                "there when the next backward began",
                f"the norm of one of them is {norm:.6g} when a step ends, and the same when the "
                "next backward begins",
            ),
            fix="Call optimizer.zero_grad() once for each step, before the backward.",
            about=f"unzeroed {path}:{line}",
        )


def _is_carried(record: Record) -> bool:
    """Whether gradients were really there, and not set to zero without anybody seeing it."""
    after, before, edited = (record.get(key) or [] for key in ("after", "before", "edited"))
    return bool(after) and after == before and min([*after, *edited]) > 0
