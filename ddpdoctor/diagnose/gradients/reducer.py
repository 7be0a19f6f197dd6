"""Read the exceptions of DDP's reducer, group records by module, and find constant losses.

DDP reduces nothing on ranks whose loss depends on no parameter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import named
from ddpdoctor.core.opening import whole
from ddpdoctor.core.relations import ABORT, MISPAIRED, STANDSTILL
from ddpdoctor.core.syntax import FUNCTIONS, last_name
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.crashes.rank_endings import PATIENCE
from ddpdoctor.diagnose.source_files import brief, files_of, quoted, tree_of
from ddpdoctor.run.records.model import (
    BatchNormRecord,
    ConstantLossRecord,
    DdpRecord,
    FindUnusedRecord,
    NeverUsedRecord,
    NoGradientRecord,
    NoSyncVainRecord,
    UnownedRecord,
)
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.snapshot import Rank, Run

UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""DDP's message about a parameter without a gradient."""

STATIC = "training graph has changed in this iteration"
"""DDP's message about the same under static_graph=True (DDP306)."""

TWICE = "Expected to mark a variable ready only once"
"""DDP's message about a gradient that was ready twice in one backward."""

SHOWN = 4  # Maximum number of parameters in a message, which counts the rest.


def listed(names: Sequence[str], count: int | None = None) -> str:
    """List the first names, and the number of the others."""
    rest = (len(names) if count is None else count) - min(SHOWN, len(names))
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def reducer_complaints(run: Run, what: str) -> list[tuple[Rank, ErrorRecord]]:
    """Return the last attempt's ranks that failed with the reducer's message, and its records."""
    return [
        (rank, error)
        for rank in run.last
        for error in rank.records.of(ErrorRecord)
        if what in error.message and STATIC not in error.message
    ]


def is_explained(error: str) -> bool:
    """Return whether a rule of the DDP3xx family names the cause of an exception."""
    return (UNFINISHED in error and STATIC not in error) or TWICE in error


def named_parameters(rank: Rank, error: ErrorRecord) -> list[str]:
    """Return the names of the parameters that DDP's exception lists by index.

    With several DDP modules an index may belong to any of them, so it stays a number.
    """
    found = re.findall(r"did not receive grad for rank \d+: ([\d ]+)", error.message)
    found = found or re.findall(r"Parameter at index (\d+)", error.message)
    built = rank.records.of(DdpRecord)
    names = [each.name for each in built[0].parameters] if len(built) == 1 else []
    numbers = [whole(number) for text in found for number in text.split()]
    return [names[number] if number < len(names) else f"parameter {number}" for number in numbers]


R = TypeVar(
    "R", FindUnusedRecord, BatchNormRecord, NeverUsedRecord, NoSyncVainRecord, UnownedRecord
)


@dataclass(frozen=True)
class OfModule(Generic[R]):
    """The records of one class about one DDP module, by rank."""

    records: tuple[tuple[Rank, R], ...]  # The lowest rank first

    @property
    def record(self) -> R:
        """The first record of the lowest rank."""
        return self.records[0][1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(dict.fromkeys(rank.rank for rank, _ in self.records))

    @property
    def built(self) -> DdpRecord | None:
        """The record of the module's creation."""
        return self.records[0][0].ddp(self.record.ddp)

    @property
    def built_at(self) -> Location | None:
        """The line that created the module."""
        return self.built.location if self.built is not None else None


def by_module(run: Run, declared: type[R]) -> dict[int, OfModule[R]]:
    """Group the records of a class by the number of their DDP module, ascending."""
    found: dict[int, list[tuple[Rank, R]]] = {}
    for rank in run.last:
        for record in rank.records.of(declared):
            found.setdefault(record.ddp, []).append((rank, record))
    return {number: OfModule(tuple(found[number])) for number in sorted(found)}


@dataclass(frozen=True)
class Missing:
    """The parameters of a DDP module that got no gradient on some ranks."""

    ddp: int
    records: dict[int, NoGradientRecord]  # The probe's records, by rank
    errors: dict[int, ErrorRecord]  # DDP's exceptions, by rank
    silent: list[int]  # The ranks without missing gradients

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks without some gradients, ascending."""
        return tuple(sorted({*self.records, *self.errors}))

    @property
    def error(self) -> ErrorRecord | None:
        """DDP's exception on the lowest rank that has one."""
        return self.errors[min(self.errors)] if self.errors else None

    @property
    def altered(self) -> bool:
        """Whether the parameters were frozen or replaced after DDP was created."""
        return any(
            each.why in ("frozen", "replaced")
            for record in self.records.values()
            for each in record.parameters
        )

    def evidence(self) -> Iterator[str]:
        """Yield DDP's reaction as evidence."""
        for rank, error in sorted(self.errors.items())[:2]:
            yield (
                f"rank {rank}: DDP raised in step {error.step}, "
                f'"{UNFINISHED} before starting a new one"'
            )
        if not self.errors:
            yield "DDP has not reduced their bucket, and raises at the next synchronized forward"


def missing_gradients(run: Run) -> Iterator[Missing]:
    """Yield the modules with missing gradients, once every rank has had time to report them."""
    records: dict[int, dict[int, NoGradientRecord]] = {}
    for rank in run.last:
        for record in rank.records.of(NoGradientRecord):
            records.setdefault(record.ddp, {}).setdefault(rank.rank, record)
    errors = {rank.rank: error for rank, error in reducer_complaints(run, UNFINISHED)}
    if errors and not records:
        records[0] = {}
    for number, found in sorted(records.items()):
        guilty = {*found, *errors}
        others = [
            rank
            for rank in run.last
            if rank.rank not in guilty
            and (built := rank.ddp(number)) is not None
            and not guilty.isdisjoint(built.group_ranks)
        ]
        last = max((record.step for record in found.values()), default=0)
        # Report DDP's exception even if the other ranks are unknown.
        known = bool(errors) or all(rank.watched(NoGradientRecord) for rank in others)
        if known and all(_has_reported(run, rank, last) for rank in others):
            yield Missing(number, found, errors, [rank.rank for rank in others])


def _has_reported(run: Run, rank: Rank, step: int) -> bool:
    """Return whether a rank would have reported a missing gradient of a step by now."""
    if run.exit_status is not None or rank.ended is not None or rank.status is None:
        return True
    # The status page is ahead of the journal, which holds the record.
    written = rank.steps[-1].step if rank.steps else -1
    return written >= step or run.waits_for(rank) > PATIENCE


# -- losses that depend on no parameter


_MAX_LISTED = 3
_MAKERS = ("tensor", "scalar_tensor", "zeros", "ones", "full", "empty", "zeros_like", "ones_like")
"""Functions that create a constant tensor. As methods, their names begin with ``new_``."""


def mispairs(cause: Finding, effect: Finding) -> bool:
    """Return whether the cause mispairs collectives, so that parameters may differ afterwards."""
    return MISPAIRED in cause.subjects


def constant_losses(run: Run) -> Iterator[Finding]:
    """Yield a finding for a group's first backward that some ranks ran with a constant loss."""
    for group in dict.fromkeys(
        record.group_ranks for rank in run.last for record in rank.records.of(DdpRecord)
    ):
        ranks = [rank for rank in run.last if rank.rank in group]
        made = {
            rank.rank: {each.backward: each for each in rank.records.of(ConstantLossRecord)}
            for rank in ranks
        }
        for number in sorted({each for records in made.values() for each in records}):
            alone = [rank for rank in ranks if number in made[rank.rank]]
            others = [rank for rank in ranks if _reduced(rank, number, made[rank.rank])]
            if others:
                yield _finding(run, alone, others, made[alone[0].rank][number])
                break


def _reduced(rank: Rank, number: int, constant: dict[int, ConstantLossRecord]) -> bool:
    """Return whether a rank has certainly begun a backward from its model's loss."""
    begun = rank.status.reduced if rank.status is not None else 0
    # The first constant losses are all recorded: up to the last record none is missing.
    until_last = not rank.lost and number < max(constant, default=0)
    watched = until_last or rank.watched(ConstantLossRecord)
    return begun >= number not in constant and watched


def _finding(run: Run, alone: list[Rank], others: list[Rank], first: ConstantLossRecord) -> Finding:
    who = named(each.rank for each in alone)
    backward = first.location
    places = _constants(run)
    place = places[0] if len(places) == 1 else backward
    loss = "its loss is a constant"
    if place != backward:
        loss += f" from {quoted(place)}"
    return Finding(
        code="DDP305",
        about=f"constant loss {place}",
        severity=Severity.ERROR,
        subjects=frozenset((MISPAIRED, STANDSTILL, ABORT)),
        message=f"the backward of {who} at {quoted(backward)} touched no parameter in step "
        f"{first.step}: {loss}. DDP reduced nothing there, while "
        f"{named(each.rank for each in others)} waited for {who} or met its next collective",
        ranks=tuple(each.rank for each in alone),
        location=place,
        evidence=tuple(
            f"a constant with requires_grad is made at {brief(each)}"
            for each in places[:_MAX_LISTED]
        )
        if len(places) > 1
        else (),
        fix="Make the loss depend on the model's output on every rank: `prediction.sum() * 0` "
        "where there is nothing to learn from, not a new tensor.",
    )


def _constants(run: Run) -> list[Location]:
    """Return the lines that create a constant with ``requires_grad``: the losses, if any is one."""
    found: dict[Location, bool] = {}
    for path in files_of(run):
        tree = tree_of(path)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, (*FUNCTIONS, ast.Assign, ast.Return)):
                names = [ast.unparse(each) for each in getattr(node, "targets", ())]
                names.append(str(getattr(node, "name", "")))
                of_loss = any("loss" in each.lower() for each in names)
                for each in ast.walk(node):
                    if isinstance(each, ast.Call) and _makes_constant(each):
                        place = Location(path, each.lineno)
                        found[place] = found.get(place, False) or of_loss
    return [at for at, of_loss in found.items() if of_loss] or list(found)


def _makes_constant(call: ast.Call) -> bool:
    """Return whether a call creates a tensor with ``requires_grad``, or sets it on a new one."""
    name = last_name(call.func).removeprefix("new_")
    if name == "requires_grad_":
        inner = getattr(call.func, "value", None)
        turned_off = any(isinstance(each, ast.Constant) and not each.value for each in call.args)
        made = isinstance(inner, ast.Call) and _is_maker(last_name(inner.func))
        return made and not turned_off
    return _is_maker(name) and any(
        each.arg == "requires_grad" and isinstance(each.value, ast.Constant) and each.value.value
        for each in call.keywords
    )


def _is_maker(name: str) -> bool:
    return name.removeprefix("new_") in _MAKERS
