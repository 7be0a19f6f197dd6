"""Models that differ between ranks before the first step (DDP707)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.core.relations import MODELS
from ddpdoctor.run.records.model import ModelRecord
from ddpdoctor.run.snapshot import Run

_REFUSALS = ("DDP expects same model across all ranks", "appears not to match")
"""What DDP says of models with other counts or shapes, on some of the ranks."""


def refused(error: str) -> bool:
    """Whether an exception is DDP's refusal of models that differ."""
    return any(each in error for each in _REFUSALS)


@rule("DDP707", "models-differ", Severity.ERROR)
def models_differ(run: Run) -> Iterator[Finding]:
    """The model structure differs between ranks.

    What it finds
        Trainable parameters whose number, order, shape or dtype differs between ranks when
        `DistributedDataParallel` is created.

    Why it is bad
        DDP matches parameters by their order only. It raises on some ranks and leaves the others
        waiting. If only dtype or order differ, it raises no error, and broadcasts and averages
        bytes that do not belong together.

    How to fix it
        Build the model from the same configuration on every rank. If a vocabulary or a number of
        classes is counted in the data, count it in all of the data, or broadcast it.

    Example
        Wrong: `nn.Linear(512, len(set(my_shard_labels)))`
        Right: `nn.Linear(512, len(set(all_labels)))`

    When it stays silent
        For parameters with `requires_grad=False`, for names that differ while everything else is
        equal, and after the 16th model of a process.
    """
    shared: dict[tuple[int, tuple[int, ...]], dict[int, ModelRecord]] = {}
    for rank in run.last:
        for record in rank.records.of(ModelRecord):
            if rank.rank in record.group:
                shared.setdefault((record.number, record.group), {})[rank.rank] = record
    for (number, group), models in sorted(shared.items()):
        missing = any(rank.rank in group and rank.rank not in models for rank in run.last)
        if missing and run.exit_status is None:
            # With one more, another rank may be the odd one.
            continue
        if not _differ(models):
            continue
        kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for each, record in sorted(models.items()):
            kinds[_kind(record, models)].append(each)
        groups = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
        # Without a majority none is right; each is held against the first.
        clear = 2 * len(groups[0]) > len(models)
        usual = groups[0] if clear else min(groups)
        odd = [ranks for ranks in groups if ranks is not usual]
        yield Finding(
            code="DDP707",
            about=f"model {number}",
            subjects=frozenset((MODELS,)),
            severity=Severity.ERROR,
            message=_message(models, usual, odd, clear),
            ranks=tuple(sorted(rank for ranks in (odd if clear else groups) for rank in ranks)),
            location=models[odd[0][0]].location,
            evidence=tuple(
                f"{named(ranks)}: {models[ranks[0]].count} parameters, "
                f"{_elements(models[ranks[0]]):,} elements"
                for ranks in sorted(groups)[:6]
            ),
            fix="Build the model from the same configuration on every rank; count classes and "
            "vocabularies in all of the data, or broadcast them.",
        )


_SHOWN = 4
"""Groups of ranks that a sentence names."""


def _message(
    models: dict[int, ModelRecord], usual: list[int], odd: list[list[int]], clear: bool
) -> str:
    """What each group of ranks gives DDP, against what the usual one does."""
    first = models[usual[0]]
    if clear and len(odd) == 1:
        verb = "give" if len(odd[0]) > 1 else "gives"
        return (
            f"{named(odd[0])} {verb} DDP another model than {named(usual)}: "
            f"{_difference(models[odd[0][0]], first)}"
        )
    everyone = named(models if not clear else [rank for ranks in odd for rank in ranks])
    head = f"{everyone} give DDP {'other' if clear else 'different'} models"
    than = f"than {named(usual)}" if clear else f"here against {named(usual)}"
    parts = [f"on {named(ranks)}, {_difference(models[ranks[0]], first)}" for ranks in odd[:_SHOWN]]
    more = f"; {len(odd) - _SHOWN} more kinds" if len(odd) > _SHOWN else ""
    return f"{head}{' ' if clear else ', '}{than}: {'; '.join(parts)}{more}"


def _kind(record: ModelRecord, models: dict[int, ModelRecord]) -> tuple[object, ...]:
    """What has to be the same; names only where all ranks have the same ones."""
    named_alike = {frozenset(each[0] for each in one.parameters) for one in models.values()}
    parameters = record.parameters
    if len(named_alike) > 1:
        return record.count, *(each[1:] for each in parameters)
    return record.count, *parameters


def _differ(models: dict[int, ModelRecord]) -> bool:
    """Whether more than names differ: shapes, dtypes, counts, or the order of the same names."""
    found = [record.parameters for record in models.values()]
    if len({record.count for record in models.values()}) > 1:
        return True
    if len({tuple(each[1:] for each in parameters) for parameters in found}) > 1:
        return True
    names = [tuple(name for name, _, _ in parameters) for parameters in found]
    return len(set(names)) > 1 and len({frozenset(each) for each in names}) == 1


def _difference(here: ModelRecord, there: ModelRecord) -> str:
    """The first parameter that differs, in words."""
    mine, theirs = here.parameters, there.parameters
    for (name, shape, dtype), (other, shape_there, dtype_there) in zip(mine, theirs, strict=False):
        if shape != shape_there:
            return f"{name or other} is {list(shape)}, not {list(shape_there)}"
        if dtype != dtype_there:
            return f"{name or other} is {dtype}, not {dtype_there}"
        if name != other and here.count == there.count:
            return f"{name} stands in the place of {other}"
    # Of a large model the first parameters alone are listed.
    more, fewer = (mine, theirs) if here.count > there.count else (theirs, mine)
    known = {name for name, _, _ in fewer}
    names = ", ".join([name for name, _, _ in more if name not in known][:3]) or "some parameter"
    return f"it has {names}, too" if more is mine else f"it is without {names}"


def _elements(record: ModelRecord) -> int:
    return sum(math.prod(each.shape) for each in record.parameters)
