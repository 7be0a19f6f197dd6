"""Find losses that depend on no parameter, so that DDP reduces nothing on their ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import ABORT, MISPAIRED, STANDSTILL
from ddpdoctor.core.syntax import FUNCTIONS, last_name
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.source_files import brief, files_of, quoted, tree_of
from ddpdoctor.run.records.model import ConstantLossRecord, DdpRecord
from ddpdoctor.run.snapshot import Rank, Run

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
