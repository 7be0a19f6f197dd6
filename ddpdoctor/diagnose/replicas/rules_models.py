"""Rules for models that differ before the first step (DDP707), and for buffers (DDP704)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import MODELS
from ddpdoctor.diagnose.replicas.differences import Replica, common_records, elements, replicas
from ddpdoctor.run.records.model import BuffersRecord, ModelRecord
from ddpdoctor.run.snapshot import Run


@rule("DDP707", "models-differ", Severity.ERROR)
def models_differ(run: Run) -> Iterator[Finding]:
    """The model structure differs between ranks.

    What it finds
        Trainable parameters whose number, order, shape or dtype differs between ranks when
        `DistributedDataParallel` is created.

    Why it is bad
        DDP matches parameters by their order only. It raises on some ranks and leaves the others
        waiting. If only dtype or order differ, it raises no error, and broadcasts and averages
        unrelated bytes.

    How to fix it
        Build the model from the same configuration on every rank. If the data determine a
        vocabulary or a number of classes, use all of the data, or broadcast the result.

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
            # The missing rank may change the majority.
            continue
        if not _differ(models):
            continue
        kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for each, record in sorted(models.items()):
            kinds[_kind(record, models)].append(each)
        groups = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
        # Without a majority, each group is compared with that of the lowest rank.
        majority = 2 * len(groups[0]) > len(models)
        usual = groups[0] if majority else min(groups)
        odd = [ranks for ranks in groups if ranks is not usual]
        yield Finding(
            code="DDP707",
            about=f"model {number}",
            subjects=frozenset((MODELS,)),
            severity=Severity.ERROR,
            message=_message(models, usual, odd, majority),
            ranks=tuple(sorted(rank for ranks in (odd if majority else groups) for rank in ranks)),
            location=models[odd[0][0]].location,
            evidence=tuple(
                f"{named(ranks)}: {models[ranks[0]].count} parameters, "
                f"{sum(math.prod(each.shape) for each in models[ranks[0]].parameters):,} elements"
                for ranks in sorted(groups)[:6]
            ),
            fix="Build the model from the same configuration on every rank; count classes and "
            "vocabularies in all of the data, or broadcast them.",
        )


_SHOWN = 4  # Maximum number of groups of ranks in a message


def _message(
    models: dict[int, ModelRecord], usual: list[int], odd: list[list[int]], majority: bool
) -> str:
    """Describe how the model of each group of ranks differs from the usual one."""
    first = models[usual[0]]
    if majority and len(odd) == 1:
        verb = "give" if len(odd[0]) > 1 else "gives"
        return (
            f"{named(odd[0])} {verb} DDP another model than {named(usual)}: "
            f"{_first_difference(models[odd[0][0]], first)}"
        )
    everyone = named(models if not majority else [rank for ranks in odd for rank in ranks])
    head = f"{everyone} give DDP {'other' if majority else 'different'} models"
    than = f" than {named(usual)}" if majority else f", here against {named(usual)}"
    parts = [
        f"on {named(ranks)}, {_first_difference(models[ranks[0]], first)}" for ranks in odd[:_SHOWN]
    ]
    more = f"; {len(odd) - _SHOWN} more kinds" if len(odd) > _SHOWN else ""
    return f"{head}{than}: {'; '.join(parts)}{more}"


def _kind(record: ModelRecord, models: dict[int, ModelRecord]) -> tuple[object, ...]:
    """Return the properties that must be equal. Names only if all ranks have the same."""
    named_alike = {frozenset(each[0] for each in one.parameters) for one in models.values()}
    parameters = record.parameters
    if len(named_alike) > 1:
        return record.count, *(each[1:] for each in parameters)
    return record.count, *parameters


def _differ(models: dict[int, ModelRecord]) -> bool:
    """Return whether more than names differ: shapes, dtypes, counts, or the order of names."""
    found = [record.parameters for record in models.values()]
    if len({record.count for record in models.values()}) > 1:
        return True
    if len({tuple(each[1:] for each in parameters) for parameters in found}) > 1:
        return True
    names = [tuple(name for name, _, _ in parameters) for parameters in found]
    return len(set(names)) > 1 and len({frozenset(each) for each in names}) == 1


def _first_difference(here: ModelRecord, there: ModelRecord) -> str:
    """Describe the first parameter that differs."""
    mine, theirs = here.parameters, there.parameters
    for (name, shape, dtype), (other, shape_there, dtype_there) in zip(mine, theirs, strict=False):
        if shape != shape_there:
            return f"{name or other} is {list(shape)}, not {list(shape_there)}"
        if dtype != dtype_there:
            return f"{name or other} is {dtype}, not {dtype_there}"
        if name != other and here.count == there.count:
            return f"{name} stands in the place of {other}"
    # Only the first parameters of a large model are listed.
    more, fewer = (mine, theirs) if here.count > there.count else (theirs, mine)
    known = {name for name, _, _ in fewer}
    names = ", ".join([name for name, _, _ in more if name not in known][:3]) or "some parameter"
    return f"it has {names}, too" if more is mine else f"it is without {names}"


# -- buffers

MIN_SAMPLES = 3  # Minimum number of consecutive samples with a difference
NEAR = 0.5  # Maximum difference of two ranks' versions of one buffer, relative to the norm
SLOW = 0.75
"""Maximum change of an accumulating buffer per step, relative to the distance between ranks."""

_Sample = tuple[int, list[BuffersRecord], list[int]]
"""A step, the ranks' records, and the buffer's index in each record."""


@rule("DDP704", "buffers-differ", Severity.WARNING)
def buffers_differ(run: Run) -> Iterator[Finding]:
    """A buffer of the model differs between ranks, and DDP does not broadcast it.

    What it finds
        Floating-point buffers of the state dict that differ between ranks when a forward begins,
        after DDP's broadcast, but stay similar and change little per step: a codebook, a center or
        an average that each rank computes from its data. A warning if DDP was meant to broadcast
        them: it does not if the module had no buffers when DDP was created. Information with
        `broadcast_buffers=False`, and for single numbers, which may be a rank's metrics.

    Why it is bad
        The ranks compute with values that differ from the saved ones, which are rank 0's. The
        values of the other ranks are lost.

    How to fix it
        Make the update the same on every rank: all-reduce the values that the buffer is computed
        from. Register buffers in `__init__`, before DDP is created, and let DDP broadcast them.

    Example
        Wrong:
            self.codebook.lerp_(means, 0.01)  # means of this rank's batch
        Right:
            dist.all_reduce(means, op=dist.ReduceOp.AVG)
            self.codebook.lerp_(means, 0.01)

    When it stays silent
        For running statistics (BatchNorm, InstanceNorm, names like `running_mean`), integers,
        buffers that are not saved (`persistent=False`), buffers that DDP ignores by request, and
        buffers that are unrelated or new in every step (hidden states, queues). Without the
        broadcast, for buffers that differ from the start.
    """
    for replica in replicas(run):
        samples = common_records(replica.ranks, BuffersRecord, replica.module)
        names = {
            name for records in samples.values() for record in records for name in record.names
        }
        found = [
            each
            for name in sorted(names)
            if (each := _buffer_difference(replica, samples, name)) is not None
        ]
        if not found:
            continue
        meant = any(each.broadcast for each in found)
        found = [each for each in found if each.broadcast == meant]
        first, built = found[0], replica.ranks[0].ddp(replica.module)
        what = f"{first.name} differs"
        if len(found) > 1:
            what = f"{first.name} and {len(found) - 1} more differ"
        everyone = tuple(rank.rank for rank in replica.ranks)
        why = (
            "DDP broadcasts no buffers, as the module had none when DDP was built"
            if meant
            else "DDP's broadcast of buffers is turned off"
        )
        warns = meant and not all(each.single for each in found)
        yield Finding(
            code="DDP704",
            about=f"module {replica.module}",
            severity=Severity.WARNING if warns else Severity.INFO,
            message=f"buffer {what} between {named(everyone)} since step {first.step}, and {why}",
            ranks=everyone,
            location=built.location if built is not None else None,
            evidence=tuple(each.text for each in found[:3]),
            fix="Register it before DistributedDataParallel(model), which then broadcasts rank 0's,"
            " or all-reduce the values that it is computed from."
            if meant
            else "If it is meant to be one for all ranks, all-reduce what it is computed from; a "
            "checkpoint holds rank 0's alone.",
        )


@dataclass(frozen=True)
class _BufferDifference:
    name: str
    step: int
    broadcast: bool
    single: bool  # Whether it is a single number, such as a rank's average loss
    text: str


def _buffer_difference(
    replica: Replica, written: dict[tuple[int, int], list[BuffersRecord]], name: str
) -> _BufferDifference | None:
    """Return the difference of a buffer if it became different and remained so."""
    samples: list[_Sample] = [
        (step, records, [record.names.index(name) for record in records])
        for (step, _), records in written.items()
        if all(name in record.names for record in records)
    ]
    differs = [
        len({record.hashes[at : at + 1] for record, at in zip(records, places, strict=True)}) > 1
        for _, records, places in samples
    ]
    if True not in differs:
        return None
    first = differs.index(True)
    if len(differs) - first < MIN_SAMPLES or not all(differs[first:]):
        return None
    step, records, places = samples[-1]
    broadcast = all(record.broadcast for record in records)
    if (first == 0 and not broadcast) or not _gathers(samples[first:]):
        return None
    values = [_values(record, at) for record, at in zip(records, places, strict=True)]
    norms = [
        f"{math.hypot(*each):.4g} on rank {rank.rank}"
        for each, rank in zip(values[:4], replica.ranks, strict=False)
    ]
    equal = f"equal before step {samples[first - 1][0]}, " if first else ""
    return _BufferDifference(
        name,
        samples[first][0],
        broadcast,
        len(values[0]) == 1,
        f"{name}: {equal}different at all {len(differs) - first} looks from step "
        f"{samples[first][0]} to {step}; norm of {len(values[0])} elements {', '.join(norms)}",
    )


def _values(record: BuffersRecord, at: int) -> tuple[float, ...]:
    return elements(record.samples[at]) if at < len(record.samples) else ()


def _gathers(samples: list[_Sample]) -> bool:
    """Return whether ranks hold versions of one buffer: similar, and changing little per step.

    A buffer computed from each batch changes per step as much as ranks differ.
    """
    values = {
        step: [_values(record, at) for record, at in zip(records, places, strict=True)]
        for step, records, places in samples
    }
    pairs = [(each, values[step + 1]) for step, each in values.items() if step + 1 in values]
    if not pairs:
        return False
    before, after = pairs[-1]
    differences = [_distance(after[0], other) for other in after[1:]]
    moved = [_distance(one, other) for one, other in zip(before, after, strict=True)]
    size = max(math.hypot(*each) for each in after)
    if not all(map(math.isfinite, (*differences, *moved, size))):
        return False
    return 0 < max(differences) <= NEAR * size and max(moved) <= SLOW * max(differences)


def _distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the distance of two lists of values. Infinity if they cannot be compared."""
    return math.dist(one, other) if len(one) == len(other) else math.inf
