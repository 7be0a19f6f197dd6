"""An epoch of a run: how many steps and samples it has, and which samples."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ddpdoctor.core.syntax import last_name
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.data.draws import Pass, other_data, passes_of
from ddpdoctor.diagnose.source_files import nodes_of, source_of
from ddpdoctor.diagnose.source_operations import callers
from ddpdoctor.run.records.training import PassRecord, TrainedRecord
from ddpdoctor.run.snapshot import Rank, Run

MAX_CALLERS = 4  # Functions between a loader's loop and the loop over epochs
MIN_FALLS = 0.1  # Part of the pairs of neighbours in a batch that fall, if data are shuffled


@dataclass(frozen=True)
class Epoch:
    """A pass over the training data, the first that all ranks finished, or else their first.

    Attributes:
        length: Samples of the data set of the first rank. None if not known.
        steps: Optimizer steps.
        batches: Batches of a rank.
        drawn: Samples that the ranks drew together. None if they did not finish it.
        missing: Samples of that data set that no rank drew.
        doubled: Draws of samples that were drawn before, on any rank, if all have that data set.
        apart: Whether ranks have other samples under the same index.
        shuffled: Whether a rank's batches are not in order. None if not known.
        made: The line that built the loader.
        repeated: Whether the training is a number of these, by the loops of the source.
    """

    length: int | None
    steps: int
    batches: int
    drawn: int | None = None
    missing: int = 0
    doubled: int = 0
    apart: bool = False
    shuffled: bool | None = None
    made: Location | None = None
    repeated: bool = False


def epoch_of(run: Run, ranks: Sequence[Rank]) -> Epoch | None:
    """Return the first pass that all ranks trained on to its end, or else what is known of one."""
    every = [[each for each in passes_of(rank) if each.trains] for rank in ranks]
    if not all(every):
        return None
    ended = [[each for each in mine if each.record.state == "ended"] for mine in every]
    first = (ended if all(ended) else every)[0][0]
    record = first.record
    forwards = median(each.forwards for each in ranks[0].records.of(TrainedRecord))
    epoch = Epoch(
        length=record.subset_length or record.length,
        steps=math.ceil((record.batches or 0) / max(1, round(forwards))),
        batches=record.batches or 0,
        made=record.made,
        repeated=record.to_end and _repeated(run, first.read),
    )
    if all(ended):
        return _finished(epoch, ranks, [mine[0] for mine in ended])
    return epoch if epoch.batches else None


def _finished(epoch: Epoch, ranks: Sequence[Rank], passes: Sequence[Pass]) -> Epoch:
    """Return an epoch with the samples that the ranks drew."""
    steps = [
        [one for one in rank.records.of(TrainedRecord) if _is_within(one, each.record)]
        for rank, each in zip(ranks, passes, strict=True)
    ]
    record = passes[0].record
    draws = sum(each.record.draws for each in passes)
    hits = [each.hits for each in passes]
    union = frozenset[int]().union(*hits)
    again = sum(map(len, hits)) - len(union) + sum(each.record.repeats for each in passes)
    # The whole data set is followed, unless it is very large.
    share = (epoch.length or 0) / (record.followed or 1) if union else 0.0
    pairs = record.draws - record.fetched
    return replace(
        epoch,
        steps=len(steps[0]) or epoch.steps,
        batches=record.fetched,
        drawn=draws or sum(one.samples for mine in steps for one in mine),
        missing=round((record.followed - len(union)) * share),
        doubled=round(again * share),
        apart=other_data({each.rank: each for each in passes}),
        shuffled=record.falls > MIN_FALLS * pairs if pairs >= record.fetched > 0 else None,
    )


def _is_within(step: TrainedRecord, record: PassRecord) -> bool:
    return record.armed < step.armed <= (record.armed_after or 0)


def _repeated(run: Run, read: Location) -> bool:
    """Return whether a loop over a number of epochs is around the loop over a loader."""
    at: Location | None = read
    for _ in range(MAX_CALLERS):
        source = source_of(at.path) if at is not None else None
        if at is None or source is None:
            return False
        loops = source.around(at.line)
        if loops:
            return isinstance(loops[0], ast.For) and not _follows(at.path, loops[0].iter)
        calls = callers(run, at)
        at = calls[0] if len(calls) == 1 else None
    return False


def _follows(path: str, epochs: ast.expr) -> bool:
    """Return whether a number of epochs may be that which a number of steps takes."""
    names = {last_name(each) for each in ast.walk(epochs)} - {"", "range"}
    made = [
        node.value
        for node in nodes_of(path)
        if isinstance(node, ast.Assign) and any(last_name(each) in names for each in node.targets)
    ]
    return any(
        isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv))
        for value in (epochs, *made)
        for node in ast.walk(value)
    )
