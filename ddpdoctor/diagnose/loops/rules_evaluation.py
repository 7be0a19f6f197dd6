"""Rules for evaluation (DDP106, DDP107, DDP402, DDP708): shards, guards and statistics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import MISPAIRED, STANDSTILL, brings_about, same_subject
from ddpdoctor.diagnose import STANDSTILLS
from ddpdoctor.diagnose.data.draws import (
    MIN_SAMPLES,
    MIN_WHOLE,
    Pass,
    Passes,
    matched,
    other_data,
    overlap,
    passes_of,
    same_part,
)
from ddpdoctor.diagnose.loops.metric_sources import (
    Averaged,
    evaluated_by_hand,
    indexed_by_rank,
    ratio_reduced,
    use_of,
)
from ddpdoctor.diagnose.loops.training_loops import alone_evaluating
from ddpdoctor.diagnose.replicas.differences import elements
from ddpdoctor.diagnose.source_files import location
from ddpdoctor.diagnose.source_operations import updated_on_some_ranks
from ddpdoctor.run.records.model import OtherModelRecord, StatisticsRecord
from ddpdoctor.run.records.training import SaveRecord
from ddpdoctor.run.snapshot import Run

MIN_DISTANCE = 0.01
"""Minimum difference of statistics that changes an evaluation. The unit is a standard deviation for
means, and a ratio for variances."""
PART_OF_NORM = 1e-6  # Relative tolerance of norms of equal weights
OTHER_DATA = 0.25
"""Minimum difference if ranks train on different kinds of data, not on shards of one set."""


def _evaluation_passes(run: Run) -> Iterator[list[Pass]]:
    """Yield finished passes in which every rank read its shard of one data set without training."""
    for passes in matched(run):
        each = list(passes.values())
        if (
            all(
                _is_evaluation(one)
                and one.record.armed > 0
                and one.shard is not None
                and one.shard[1] == len(each)
                for one in each
            )
            and len({one.length for one in each}) == 1
            and same_part(passes)
            and len({one.shard for one in each}) == len(each)
        ):
            yield each


def _is_evaluation(one: Pass) -> bool:
    return one.record.state == "ended" and not one.record.marks and one.indexed


@rule("DDP106", "eval-shard-not-reduced", Severity.WARNING)
def not_reduced(run: Run) -> Iterator[Finding]:
    """Each rank evaluates its own shard, and the results are not combined, or combined wrongly.

    What it finds
        An evaluation in which every rank reads its own shard, and no rank reduces or gathers
        anything before it continues training or ends, while the source prints, logs or compares the
        result (information if no such line is found). Or a reduction that averages a ratio of each
        rank (an accuracy, an F1 score) although the shards have different sizes.

    Why it is bad
        The metric is that of one shard. The number that rank 0 prints, and that selects the best
        checkpoint or stops early, covers only part of the validation data. An average of ratios
        weighs samples differently, and an average of F1 scores is not the F1 score of all samples.

    How to fix it
        Sum the counts over the ranks before you divide.

    Example
        Wrong:
            accuracy = right / seen
        Right:
            counts = torch.tensor([right, seen])
            dist.all_reduce(counts)
            accuracy = counts[0] / counts[1]

    When it stays silent
        If anything is reduced or gathered in between, for whatever purpose, unless it is known to
        be a ratio. If a line prints a result with its rank, or writes it to a file of its rank. For
        data that every rank reads in full, and before the first training step.
    """
    if len(run.last) < 2:
        return
    for each in (*_evaluation_passes(run), *_disjoint_passes(run)):
        if len(each) != len(run.last) or any(one.record.collectives is None for one in each):
            continue
        found = _averaged(run, each) if all(map(_combined, each)) else _uncombined(run, each)
        if found is not None:
            yield found
            return
    yield from _by_hand(run)


def _by_hand(run: Run) -> Iterator[Finding]:
    """Yield findings for evaluations sharded by hand in a job that combines nothing."""
    rings = [rank.ring for rank in run.last if rank.counted_collectives]
    if (
        run.exit_status != 0
        or len(rings) < len(run.last)
        or any(
            ring is None
            or ring.calls > len(ring.collectives)
            or any(each.point_to_point or _COMBINES.search(each.name) for each in ring.collectives)
            for ring in rings
        )
    ):
        return
    for at in evaluated_by_hand(run):
        use = use_of(run, at)
        if use.at is None or use.computed is None or use.labelled:
            continue
        yield Finding(
            code="DDP106",
            about=str(at),
            severity=Severity.WARNING,
            message=f"each rank evaluates only its shard at {at}, and no collective combines "
            "the results",
            location=use.computed,
            evidence=(
                "the loop takes the samples of its rank, and the job never reduces or gathers",
                f"the result is used at {use.at}",
            ),
            fix="all_reduce the sums and counts of the metric before dividing them.",
        )
        return


_COMBINES = re.compile("reduce|gather|all_to_all")


def _disjoint_passes(run: Run) -> Iterator[list[Pass]]:
    """Yield evaluations whose ranks drew different samples of one data set without a sampler."""
    for passes in matched(run):
        each = list(passes.values())
        if any(
            not _is_evaluation(one) or one.record.armed == 0 or one.shard is not None
            for one in each
        ):
            continue
        if other_data(passes) and indexed_by_rank(run) is not None:
            yield each
        elif len({one.whole for one in each}) == 1:
            # The followed indices are the same on each rank of a data set without subsets, and the
            # rank's own with them.
            followed = {(one.record.subset, one.record.followed) for one in each}
            shared, total = overlap(passes)
            apart = not shared or all(_is_filled_share(one, len(each)) for one in each)
            drawn = max(MIN_SAMPLES, MIN_WHOLE * sum(n for _, n in followed))
            if apart and total - shared >= drawn:
                yield each


def _is_filled_share(one: Pass, world: int) -> bool:
    """Return whether a rank drew its share of the samples, padded to whole batches."""
    draws, batches = one.record.draws, one.record.fetched
    part = -(-one.length // world)
    return batches > 0 and part <= draws < part + draws / batches and draws < one.length


def _uncombined(run: Run, each: list[Pass]) -> Finding | None:
    """Return the finding for an evaluation whose results no rank reduces or gathers."""
    if any(map(_combined, each)) or _separate_files(run, {one.rank: one for one in each}):
        return None
    counted = all(rank.counted_collectives for rank in run.last)
    if not counted or (any(one.record.collectives for one in each) and _sends(run)):
        return None
    at = each[0].read
    use = use_of(run, at)
    if use.labelled or use.kept:
        return None
    others = max(one.record.collectives or 0 for one in each)
    evidence = [*_shares(each), "0 reductions or gathers before the next training step"]
    if others:
        evidence.append(f"{others} other collectives (barriers, broadcasts)")
    if use.at is not None:
        evidence.append(f"the result is used at {use.at}")
    fix = "all_reduce the sums and counts of the metric before dividing them."
    if use.over_all:
        evidence.append(
            f"{use.computed} divides what a rank counted in its shard by the length of all the data"
        )
        fix = "all_reduce the count before dividing it by the length of the data set."
    return Finding(
        code="DDP106",
        about=str(at),
        severity=Severity.INFO if use.at is None else Severity.WARNING,
        message=f"each rank evaluates only its shard at {at}, and no collective combines "
        "the results",
        location=use.computed or use.at or at,
        evidence=tuple(evidence),
        fix=fix,
    )


def _averaged(run: Run, each: list[Pass]) -> Finding | None:
    """Return the finding for an evaluation after which the ranks' ratios are averaged."""
    if any(one.record.gathers for one in each):
        return None
    ratios = _reduced_ratios(run, each[0])
    uneven = len({one.record.draws for one in each}) > 1
    wrong = (each for each in ratios if uneven or each.never_a_mean or each.over_all)
    found = next(wrong, None)
    if found is None:
        return None
    why = "the shards have different sizes"
    if found.over_all:
        why = "each is divided by the length of all the data already"
    if found.never_a_mean:
        why = "its value for all samples is not the average of the shards' values"
    return Finding(
        code="DDP106",
        about=str(each[0].read),
        severity=Severity.WARNING,
        message=f"each rank computes the metric of its shard at {found.at}, and the ranks' values "
        f"are averaged, though {why}",
        location=found.at,
        evidence=_shares(each),
        fix="all_reduce the sums and counts, and compute the metric from these. Gather the "
        "predictions if it is not a quotient of sums.",
    )


def _reduced_ratios(run: Run, one: Pass) -> list[Averaged]:
    """Return ratios that a rank reduced after an evaluation. Empty if it also reduced counts."""
    rank, begun = run.rank(one.rank), one.record.closed
    later = [each.record.time for each in passes_of(rank) if each.trains]
    until = min((time for time in later if time > begun), default=run.taken)
    calls = rank.ring.collectives if rank.ring is not None else ()
    found = [
        ratio_reduced([at for site in (call.site, *call.callers) if (at := location(site))])
        for call in calls
        if "reduce" in call.name and begun <= call.began <= until
    ]
    ratios = [each for each in found if each is not None]
    return ratios if len(ratios) == len(found) else []


def _shares(each: list[Pass]) -> tuple[str, ...]:
    return tuple(f"rank {one.rank}: {one.record.draws} of {one.whole} samples" for one in each[:4])


def _sends(run: Run) -> bool:
    """Return whether ranks may have sent their results to another rank."""
    return any(
        call.point_to_point or "all_to_all" in call.name
        for rank in run.last
        if rank.ring is not None
        for call in rank.ring.collectives
    )


def _separate_files(run: Run, passes: Passes) -> bool:
    """Return whether each rank may have saved its own file before it continued.

    In that case the results are meant to stay separate. Only a file's first save is recorded.
    """
    files: list[str] = []
    for rank in run.last:
        begun = passes[rank.rank].record.time
        later = [each.record.time for each in passes_of(rank) if each.trains]
        until = min((time for time in later if time > begun), default=run.taken)
        if not rank.watched(SaveRecord, until=until):
            return True
        saved = {record.file for record in rank.records.of(SaveRecord) if record.time <= until}
        if not saved:
            return False
        files += saved
    return len(set(files)) == len(files)


@rule("DDP107", "eval-padding-duplicates", Severity.WARNING)
def padded(run: Run) -> Iterator[Finding]:
    """The evaluation counts some samples twice.

    What it finds
        An evaluation over a sampler's shards that drew more samples than the data set has, because
        its length is not a multiple of the world size. A warning if a metric is then reduced over
        the ranks; otherwise information, because gathered results can be cut.

    Why it is bad
        `DistributedSampler` repeats samples until all shards have the same length. This does no
        harm in training, but a reduced accuracy is slightly wrong and depends on the world size.

    How to fix it
        Cut off the repeated samples after gathering, or give each rank a `Subset` instead of a
        sampler.

    Example
        Wrong: `DistributedSampler(validation, shuffle=False)` with 10,001 samples on 4 ranks.
        Right: `Subset(validation, range(rank, len(validation), world_size))`

    When it stays silent
        With `drop_last=True`, for lengths that divide evenly, for shards without padding, and in
        training.
    """
    for each in _evaluation_passes(run):
        first = each[0]
        drawn = sum(one.record.draws for one in each)
        extra = drawn - first.length
        if first.sampler.drop_last or not 0 < extra < len(each):
            continue
        if any(one.record.collectives is None for one in each):
            # We do not know yet how the results are used.
            continue
        reported = all(
            (one.record.reductions or 0) > 0 >= (one.record.gathers or 0) for one in each
        )
        yield Finding(
            code="DDP107",
            about=str(first.at),
            severity=Severity.WARNING if reported else Severity.INFO,
            message=f"the evaluation counts {extra} of {first.length} samples twice: the sampler "
            f"built at {first.at} pads its shards to equal length",
            location=first.at,
            evidence=(
                *(f"rank {one.rank}: {one.record.draws} samples" for one in each[:4]),
                f"together {drawn} of {first.length}",
                *(["numbers are reduced over the ranks afterwards"] if reported else []),
            ),
            fix="Drop the repeated samples after gathering, or shard the evaluation without "
            "padding.",
        )
        return


def _blames_others(cause: Finding, effect: Finding) -> bool:
    """Return whether a call under a condition kept ranks out of the others' evaluation."""
    return same_subject(cause, effect) and not set(cause.ranks) & set(effect.ranks)


def _blames_the_same(cause: Finding, effect: Finding) -> bool:
    return same_subject(cause, effect) and not _blames_others(cause, effect)


@rule(
    "DDP402",
    "forward-under-rank-guard",
    Severity.ERROR,
    supersedes={
        **dict.fromkeys(STANDSTILLS, brings_about),
        "DDP401": _blames_the_same,
        "DDP803": same_subject,
    },
    yields_to={"DDP401": _blames_others},
)
def forward_under_rank_guard(run: Run) -> Iterator[Finding]:
    """Only some ranks evaluate through the DDP wrapper of a model with buffers.

    What it finds
        A forward of the DDP object without gradients that broadcasts the model's buffers (running
        statistics of BatchNorm, say) on some ranks, at a point that the other ranks have passed
        without it.

    Why it is bad
        The broadcast is a collective. It pairs with a collective of the other ranks' next epoch, so
        the error goes unnoticed for a long time. The broadcast of the last evaluation pairs with
        none, and the job hangs or fails at its end. Before the second training step it fails at
        once.

    How to fix it
        Evaluate the model inside, `ddp.module(inputs)`, or evaluate on every rank.

    Example
        Wrong:
            if rank == 0:
                evaluate(ddp, validation)
        Right:
            if rank == 0:
                evaluate(ddp.module, validation)

    When it stays silent
        For models without buffers, with `forward_sync_buffers=False`, if all ranks evaluate, and
        after a rank left the loop alone (DDP403).
    """
    for present, found in alone_evaluating(run).items():
        point, record, absent = found[0]
        buffers = record.buffers
        times = f"{len(found)} times" if len(found) > 1 else "once"
        yield Finding(
            code="DDP402",
            about=f"evaluation {record.path}:{record.line}",
            severity=Severity.ERROR,
            message=f"{named(present)} alone evaluate{'s' if len(present) == 1 else ''} through "
            f"the DDP wrapper, whose broadcast of {buffers} buffers waits for all ranks",
            ranks=present,
            location=record.location,
            subjects=frozenset((MISPAIRED, STANDSTILL)),
            evidence=(
                f"{times}, the first one after {point} synchronized forwards; {named(absent)} "
                "passed that point without it",
                f"the model ({record.type}) has {buffers} buffers, which DDP broadcasts "
                "from rank 0",
            ),
            fix="Evaluate ddp.module instead of the wrapper, or evaluate on all ranks.",
        )


@rule("DDP708", "evaluation-differs", Severity.WARNING)
def evaluation_differs(run: Run) -> Iterator[Finding]:
    """The ranks evaluate with different running statistics and combine their results.

    What it finds
        An evaluation in which each rank of a DDP group takes a part of the data, in evaluation
        mode, with BatchNorm running statistics that differ between ranks, followed by a reduce or
        gather of numbers. Or one in which each rank evaluates all of the data with statistics that
        differ by more than 25 %, because each rank trains on different data. Or one of another
        model (an average of the weights) that differs between ranks because a line updates it on
        some ranks only.

    Why it is bad
        The metric mixes a different model from each rank. The saved model, rank 0's, was evaluated
        on its part of the data only.

    How to fix it
        Let DDP broadcast the buffers (the default), broadcast them before the evaluation, or train
        with `SyncBatchNorm.convert_sync_batchnorm(model)`, which keeps them equal.

    Example
        Wrong:
            model = DDP(net, broadcast_buffers=False)
            evaluate(model, my_shard)
        Right:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)
            evaluate(model, my_shard)

    When it stays silent
        If only one rank evaluates. If nothing is reduced or gathered, or each rank saves a separate
        file. For statistics that agree within 1 % (25 % if each evaluates all of the data), and if
        DDP broadcasts the buffers: then the statistics differ by the last step only.
    """
    members = {rank.rank for rank in run.last}
    written: dict[tuple[int, tuple[int, ...], int], dict[int, StatisticsRecord]] = {}
    for rank in run.last:
        for record in rank.records.of(StatisticsRecord):
            key = record.module, record.group, record.armed
            written.setdefault(key, {})[rank.rank] = record
    evaluations = {
        (tuple(sorted(passes)), next(iter(passes.values())).record.armed): passes
        for passes in matched(run)
        if _combines_parts(passes) or (_all_of_it(passes) and not _separate_files(run, passes))
    }
    for (module, group, armed), records in sorted(written.items()):
        passes = evaluations.get((tuple(sorted(group)), armed))
        if passes is None or set(records) != set(group) or not set(group) <= members:
            continue
        name, most, differing = _worst_statistics([records[each] for each in sorted(group)])
        whole = not _combines_parts(passes)
        if most < (OTHER_DATA if whole else MIN_DISTANCE):
            continue
        first = passes[min(passes)]
        at = first.read
        combined = "their results are combined"
        if whole:
            combined = "each rank has the statistics of the data that it trained on"
        yield Finding(
            code="DDP708",
            about=f"module {module} {at}",
            severity=Severity.WARNING,
            message=f"{named(group)} evaluate with different running statistics at {at}, "
            f"and {combined}",
            ranks=tuple(sorted(group)),
            location=at,
            evidence=(
                f"after {armed} synchronized forwards, {differing} of "
                f"{records[min(records)].layers} normalizing layers differ between ranks, layer "
                f"{name or 'without a name'} by {most:.1%}",
                "DDP's broadcast of buffers is turned off",
                *(
                    f"rank {one.rank}: {one.record.draws} samples"
                    for one in list(passes.values())[:4]
                ),
                f"{_combined(first)} reductions and gathers before the next training step",
            ),
            fix="Broadcast the buffers from one rank before the evaluation, leave "
            "forward_sync_buffers on (before torch 2.13 broadcast_buffers), or on GPUs convert "
            "the model to SyncBatchNorm.",
        )
        return
    yield from _other_model(run, evaluations.values())


def _other_model(run: Run, evaluations: Iterable[Passes]) -> Iterator[Finding]:
    """Yield findings for averaged weights that only some ranks update and all ranks evaluate."""
    at = {next(iter(passes.values())).record.armed: passes for passes in evaluations}
    seen: dict[tuple[int, int], dict[int, OtherModelRecord]] = {}
    for rank in run.last:
        for record in rank.records.of(OtherModelRecord):
            seen.setdefault((record.armed, record.number), {})[rank.rank] = record
    for (armed, _), records in sorted(seen.items()):
        if len(records) < len(run.last) or armed not in at or len({*records.values()}) == 1:
            continue
        values = [records[rank].values for rank in sorted(records)]
        if all(
            math.isclose(*pair, rel_tol=PART_OF_NORM)
            for other in values[1:]
            for pair in zip(values[0], other, strict=False)
        ):
            continue
        found = updated_on_some_ranks(run)
        if found is None:
            return
        update, use = found
        first = records[min(records)]
        norms = ", ".join(
            f"{each.values[0]:.6g} on rank {n}" for n, each in sorted(records.items())
        )
        yield Finding(
            code="DDP708",
            about=f"other model {update}",
            severity=Severity.WARNING,
            message=f"only some ranks update this {first.type}, and every rank evaluates its part "
            f"of the data with it at {use}",
            ranks=tuple(sorted(records)),
            location=update,
            evidence=(
                f"after {armed} synchronized forwards the norm of its first parameter is {norms}",
                "it belongs to no DDP module",
            ),
            fix="Update it on every rank, or broadcast it before the evaluation.",
        )
        return


def _all_of_it(passes: Passes) -> bool:
    """Return whether each rank evaluated all of one data set."""
    each = list(passes.values())
    return same_part(passes) and all(
        _is_evaluation(one) and one.record.draws >= one.length for one in each
    )


def _combines_parts(passes: Passes) -> bool:
    """Return whether each rank evaluated its part, and results were combined afterwards."""
    each = list(passes.values())
    return (
        all(_is_evaluation(one) and _combined(one) > 0 for one in each)
        # If all ranks read one data set in full, any rank's result is correct.
        and not (same_part(passes) and all(one.record.draws >= one.length for one in each))
        and len({(one.record.subset, one.record.head) for one in each}) == len(each)
    )


def _combined(one: Pass) -> int:
    """Return the number of collectives that combined results after a pass."""
    return (one.record.reductions or 0) + (one.record.gathers or 0)


def _worst_statistics(records: list[StatisticsRecord]) -> tuple[str, float, int]:
    """Return the layer that differs most, its difference, and the number of differing layers."""
    hashes = zip(*(record.hashes for record in records), strict=False)
    differing = {place // 2 for place, values in enumerate(hashes) if len(set(values)) > 1}
    found = ("", 0.0)
    names = records[0].names
    for index in sorted(differing):
        places = slice(2 * index, 2 * index + 2)
        pairs = [[elements(each) for each in record.samples[places]] for record in records]
        if any(len(pair) != 2 for pair in pairs):
            continue
        distance = _distance([(mean, variance) for mean, variance in pairs])
        if distance > found[1]:
            found = (names[index] if index < len(names) else "", distance)
    return (*found, len(differing))


def _distance(statistics: list[tuple[tuple[float, ...], tuple[float, ...]]]) -> float:
    """Return the difference of a layer's means and variances between ranks."""
    (mean, variance), *others = statistics
    size, deviation = math.hypot(*variance), math.sqrt(sum(map(abs, variance)))
    if not size or any(len(each) != len(mean) for pair in statistics for each in pair):
        return 0.0
    distance = max(
        max(math.dist(mean, theirs) / deviation, math.dist(variance, spread) / size)
        for theirs, spread in others
    )
    return distance if math.isfinite(distance) else 0.0
