"""Rules for samplers (DDP101 to DDP113): the samples that each rank drew, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from ddpdoctor.core import relations
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose import STANDSTILLS
from ddpdoctor.diagnose.data.draws import (
    MIN_SAMPLES,
    MIN_WHOLE,
    Pass,
    Passes,
    beginning,
    divided,
    equal_losses,
    matched,
    other_data,
    overlap,
    passes_of,
    same_data,
    same_order,
    same_part,
    training,
)
from ddpdoctor.diagnose.data.seeds import loop_of
from ddpdoctor.diagnose.loops.training_loops import local_decisions
from ddpdoctor.diagnose.source_operations import takes_batch_sampler
from ddpdoctor.run.snapshot import Rank, Run


def _draws_all(one: Pass) -> bool:
    """Return whether a rank draws its whole data set, each sample once."""
    followed = one.record.followed
    return followed >= MIN_SAMPLES and len(one.hits) >= MIN_WHOLE * followed and not one.draws_again


def _exceeds_share(one: Pass, world: int) -> bool:
    """Return whether a shuffle without replacement exceeds one rank's share."""
    sampler = one.sampler
    return (
        world <= 4
        and sampler.name == "RandomSampler"
        and sampler.torch
        and not sampler.replacement
        and 2 * world * one.record.draws >= 3 * one.length
        and len(one.hits) >= MIN_SAMPLES
        and one.record.repeats == 0
    )


def _unsharded(run: Run) -> Iterator[Passes]:
    """Yield training passes in which every rank draws all samples, or the same ones."""
    for passes in training(run):
        each = list(passes.values())
        # Ranks with different subsets draw from their own parts, even if these overlap.
        if any(one.shard is not None for one in each) or not same_part(passes):
            continue
        doubled, total = overlap(passes)
        everything = all(_draws_all(one) for one in each) and 4 * doubled >= total
        beyond = all(_exceeds_share(one, len(each)) for one in each) and 8 * doubled >= total
        if (everything or beyond or same_order(passes)) and same_data(passes):
            yield passes


def _unsharded_finding(code: str, passes: Passes, message: str, at: Location, fix: str) -> Finding:
    each = list(passes.values())
    first = each[0]
    lines = [f"rank {one.rank} drew {one.record.draws} of {one.length} samples" for one in each[:4]]
    if same_order(passes):
        lines.append(
            f"the first {beginning(*passes.values())[0]} samples are the same in the same order"
        )
    else:
        doubled, total = overlap(passes)
        lines.append(
            f"of {first.record.followed} samples that were followed, "
            f"{total - doubled} were drawn {total} times by all the ranks"
        )
    return Finding(
        code=code,
        about=str(at),
        severity=Severity.ERROR,
        message=message,
        ranks=tuple(passes),
        location=at,
        evidence=(
            *lines,
            f"read at {first.read} by {first.sampler.name or 'no sampler'}, {len(each)} ranks",
        ),
        fix=fix,
        subjects=frozenset((f"loader {first.made}",)),
    )


@rule("DDP101", "sampler-not-used", Severity.ERROR, supersedes={"DDP102": relations.same_subject})
def sampler_not_used(run: Run) -> Iterator[Finding]:
    """A DistributedSampler was created, but the DataLoader does not use it.

    What it finds
        A training loader from which every rank draws the whole data set, while a
        `DistributedSampler` of the same data set exists that no loader uses.

    Why it is bad
        Every rank trains on all of the data: an epoch takes as long as on one GPU. If all ranks
        draw in the same order, they even compute the same gradient.

    How to fix it
        Pass the sampler: `DataLoader(dataset, sampler=sampler)`, without `shuffle=True`.

    Example
        Wrong:
            sampler = DistributedSampler(dataset)
            loader = DataLoader(dataset, shuffle=True)
        Right:
            sampler = DistributedSampler(dataset)
            loader = DataLoader(dataset, sampler=sampler)

    When it stays silent
        In the cases in which DDP102 stays silent, if the sampler belongs to another data set, or if
        any loader used it.
    """
    for passes in _unsharded(run):
        idle = [place for one in passes.values() for place in one.record.idle[:1]]
        if len(idle) != len(passes):
            continue
        yield _unsharded_finding(
            "DDP101",
            passes,
            f"every rank trains on the whole data set: the DistributedSampler built at {idle[0]} "
            f"was never passed to the loader built at {next(iter(passes.values())).made}",
            idle[0],
            "Build the loader's batch sampler on this sampler."
            if takes_batch_sampler(next(iter(passes.values())).made)
            else "Pass sampler=<this sampler> to the training DataLoader and drop shuffle=True.",
        )
        return


@rule(
    "DDP102",
    "unsharded-train-loader",
    Severity.ERROR,
    yields_to=dict.fromkeys(("DDP101", "DDP105", "DDP115", "DDP116"), relations.of_likely),
)
def unsharded(run: Run) -> Iterator[Finding]:
    """Every rank trains on the whole data set.

    What it finds
        A training loader from which every rank of a DDP group drew all samples in one pass, or more
        than its share, or the same samples in the same order. Indices identify the samples, and the
        content of a few shows that the data is the same on all ranks. Without a loader: a loop in
        which the losses of all ranks are bitwise equal.

    Why it is bad
        N ranks do N times the work of an epoch. With the same seed on all ranks they compute the
        same gradient N times, and the effective batch is that of a single GPU.

    How to fix it
        Give each rank its part: `DistributedSampler(dataset)`, without `shuffle=True`.

    Example
        Wrong: `DataLoader(dataset, batch_size=64, shuffle=True)`
        Right: `DataLoader(dataset, batch_size=64, sampler=DistributedSampler(dataset))`

    When it stays silent
        For evaluation loaders, for data that each rank sliced itself, for draws with replacement,
        for ranks that are not replicas of each other, and where neither inputs nor labels can be
        compared. A sampler that exists but is not used is DDP101, and a loop that draws its batches
        at random is DDP601. For equal losses that only fall, as with a constant batch, or that may
        be reduced.
    """
    for passes in _unsharded(run):
        first = next(iter(passes.values()))
        if all(one.record.idle for one in passes.values()):
            continue
        yield _unsharded_finding(
            "DDP102",
            passes,
            f"every rank trains on the whole data set ({first.length} samples a pass) with the "
            f"loader built at {first.made}, instead of on its part",
            first.made,
            _sharding_fix(first),
        )
        return
    yield from _same_batches(run)


def _sharding_fix(one: Pass) -> str:
    """Describe how to give each rank its part. A loader takes a sampler or a batch sampler."""
    if not takes_batch_sampler(one.made):
        return (
            "Use sampler=DistributedSampler(dataset) in this DataLoader, without shuffle=True, "
            "and call sampler.set_epoch(epoch) before each epoch."
        )
    if one.sampler.torch:
        return (
            "Build the batch sampler on a DistributedSampler: BatchSampler(DistributedSampler("
            "dataset), batch_size, drop_last). Call that sampler's set_epoch(epoch) before each "
            "epoch."
        )
    return (
        f"Let {one.sampler.name} shuffle with the same seed on all ranks, a different one in each "
        "epoch, and yield each rank's part of the batches: batches[rank::world_size]."
    )


def _same_batches(run: Run) -> Iterator[Finding]:
    """Yield a loop without a loader in which every rank takes the same batches."""
    found = equal_losses(run)
    loop = loop_of(found.at) if found is not None else None
    if found is None or (loop is not None and loop[1]):
        return
    yield Finding(
        code="DDP102",
        about="equal losses",
        subjects=frozenset((relations.LIKELY,)),
        severity=Severity.WARNING,
        message="every rank trains on the same batches: the losses of all ranks are bitwise equal",
        ranks=found.ranks,
        location=loop[0] if loop is not None else found.at,
        evidence=(f"the loss was the same on all ranks in {found.steps} of {found.steps} steps",),
        fix="Give each rank its part of the batches, by dist.get_rank() and "
        "dist.get_world_size(): order[rank::world_size].",
    )


@rule("DDP105", "sampler-wrong-rank", Severity.ERROR)
def wrong_shard(run: Run) -> Iterator[Finding]:
    """A sampler was created with a wrong rank or number of replicas.

    What it finds
        Ranks of a DDP group whose samplers draw the same shard because `rank` or `num_replicas` is
        wrong. Shards that no rank draws because `num_replicas` is larger than the world size.

    Why it is bad
        Ranks with the same shard repeat each other's work, and the samples of the other shards are
        never used for training.

    How to fix it
        Omit both arguments, or pass `dist.get_rank()` and `dist.get_world_size()`. The local rank
        is the rank within one node only.

    Example
        Wrong: `DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=local_rank)`
        Right: `DistributedSampler(dataset)`

    When it stays silent
        If the shards together cover the data set, whichever rank draws which. For ranks that are
        not replicas of each other, for evaluation loaders, and for data that differs between ranks.
    """
    for passes in training(run):
        group = sorted(passes)
        shards = {number: shard for number in group if (shard := passes[number].shard) is not None}
        wrong = [n for i, n in enumerate(group) if shards.get(n) != (i, len(group))]
        if len(shards) != len(group) or not wrong or not same_part(passes) or other_data(passes):
            continue
        what = _wrongly_shared(run, passes, shards)
        if what is None:
            continue
        first = passes[wrong[0]]
        right = {of for _, of in shards.values()} == {len(group)}
        yield Finding(
            code="DDP105",
            about=str(first.at),
            severity=Severity.ERROR,
            message=f"{what}: the sampler built at {first.at} has a wrong "
            f"{'rank' if right else 'num_replicas'} on {named(wrong)}",
            ranks=tuple(wrong),
            location=first.at,
            evidence=tuple(
                f"rank {n}: sampler rank {shards[n][0]} of {shards[n][1]}; correct would be "
                f"{group.index(n)} of {len(group)}"
                for n in wrong[:4]
            ),
            fix="Leave rank and num_replicas out of the sampler, or pass dist.get_rank() and "
            "dist.get_world_size().",
        )
        return


def _wrongly_shared(run: Run, passes: Passes, shards: dict[int, tuple[int, int]]) -> str | None:
    """Describe shards that are drawn twice or not at all. None if that does no harm."""
    shard, times = Counter(shards.values()).most_common(1)[0]
    twins = {number: one for number, one in passes.items() if shards[number] == shard}
    if times > 1 and same_order(twins) and same_data(twins):
        return f"{named(twins)} draw the same samples"
    counts = {of for _, of in shards.values()}
    most, ranks = max(counts), len(shards)
    if len(counts) == 1 and most > run.world_size == ranks == len(set(shards.values())):
        return f"{most - ranks} of {most} shards are drawn by no rank"
    return None


@rule("DDP113", "sampler-seed-differs", Severity.ERROR)
def seeds_differ(run: Run) -> Iterator[Finding]:
    """The ranks shuffle with different seeds, so their shards overlap.

    What it finds
        Samplers with the correct rank and number of ranks whose `seed` (or epoch) differs between
        ranks, and ranks that drew the same samples in one pass.

    Why it is bad
        Each rank takes its shard from a different order: in an epoch, several ranks draw some
        samples, and no rank draws others.

    How to fix it
        Use the same sampler seed on all ranks. Only the seed of augmentation may differ by rank.

    Example
        Wrong: `DistributedSampler(dataset, seed=args.seed + rank)`
        Right: `DistributedSampler(dataset, seed=args.seed)`

    When it stays silent
        If no sample was drawn twice except those that pad the shards. If seeds and epochs are
        equal: a sampler may repeat samples on purpose. For evaluation loaders.
    """
    for passes in training(run):
        group = sorted(passes)
        if [passes[n].shard for n in group] != [(i, len(group)) for i in range(len(group))]:
            continue
        name, values = "seed", {n: passes[n].sampler.seed for n in group}
        if len(set(values.values())) == 1:
            name, values = "epoch", {n: passes[n].sampler.epoch for n in group}
        doubled, total = overlap(passes)
        if len(set(values.values())) == 1 or doubled < max(3, len(group)):
            continue
        if not same_data(passes):
            continue
        if name == "epoch" and local_decisions(run, suspected=True):
            # A local decision put the ranks into different epochs. A relation between rules cannot
            # express this, because the decision is only suspected and may do no harm yet.
            continue
        at = passes[group[0]].at
        yield Finding(
            code="DDP113",
            about=str(at),
            severity=Severity.ERROR,
            message=f"the ranks' shards overlap: the sampler built at {at} has a different {name} "
            "on each rank",
            ranks=tuple(group),
            location=at,
            evidence=(
                f"{name}: " + ", ".join(f"rank {n} has {values[n]}" for n in group[:4]),
                f"of {total} draws that were followed, {doubled} were of samples that another "
                f"rank drew in the same pass",
            ),
            fix=f"Give the sampler the same {name} on every rank.",
        )
        return


@rule(
    "DDP114",
    "other-length",
    Severity.ERROR,
    # Batches, epochs and schedules computed from the length differ as well.
    supersedes={
        **dict.fromkeys(("DDP109", "DDP117", "DDP403", "DDP702"), relations.always),
        **dict.fromkeys(STANDSTILLS, relations.brings_about),
        "DDP803": relations.afterwards,
    },
)
def lengths_differ(run: Run) -> Iterator[Finding]:
    """A sampler divides a data set that has a different length on each rank.

    What it finds
        Training loaders built at one line whose data sets differ in length between ranks, while a
        `DistributedSampler` or Accelerate divides each of them among all ranks.

    Why it is bad
        A sampler takes its part of the order of the whole data set, which has to be the same on
        every rank. Otherwise the parts overlap and leave gaps. Ranks also get different numbers of
        batches, so that schedules differ, and collectives pair with the wrong ones or hang.

    How to fix it
        Build the same data set on every rank, and let the sampler divide it. If each rank reads
        its own files, leave that sampler out, and let all ranks take the same number of batches.

    Example
        Wrong: `DistributedSampler(Corpus(files[rank::world_size]))`
        Right: `DistributedSampler(Corpus(files))`

    When it stays silent
        For loaders without such a sampler, evaluation loaders, and data sets of equal length.
    """
    for passes in matched(run):
        each = list(passes.values())
        lengths = {one.rank: one.length for one in each if one.trains and one.indexed}
        if len(lengths) < len(each) or len(set(lengths.values())) == 1 or not divided(each):
            continue
        first = each[0]
        yield Finding(
            code="DDP114",
            about=str(first.at),
            subjects=frozenset((relations.STANDSTILL,)),
            severity=Severity.ERROR,
            message="the data set that a sampler divides among the ranks has a different length on "
            "each: " + ", ".join(f"{lengths[n]} samples on rank {n}" for n in sorted(lengths)[:4]),
            ranks=tuple(sorted(lengths)),
            location=first.at,
            evidence=(
                f"the loader built at {first.made} reads {first.record.dataset or 'it'} "
                f"through a {first.sampler.name}",
            ),
            fix="Build the same data set on every rank, and let the sampler divide it.",
            moment=min(one.record.time for one in each),
        )
        return


@rule("DDP110", "unseeded-random-split", Severity.ERROR)
def other_split(run: Run) -> Iterator[Finding]:
    """The data set was split at random, and each rank has a different split.

    What it finds
        A training loader over a `Subset` of the same data and length on every rank, whose indices
        differ between ranks, while a sampler divides it into shards.

    Why it is bad
        A sample that one rank keeps for validation is training data on another rank: the validation
        is worthless. Shards of different subsets also overlap and leave gaps.

    How to fix it
        Split with a generator of a fixed seed, the same on every rank.

    Example
        Wrong: `train, val = random_split(dataset, [0.9, 0.1])`
        Right: `train, val = random_split(dataset, [0.9, 0.1], torch.Generator().manual_seed(0))`

    When it stays silent
        For a part of the data that each rank selected itself and reads without a sampler's shards,
        for evaluation loaders, and for different data sets.
    """
    for passes in training(run):
        each = list(passes.values())
        splits = {one.record.subset for one in each}
        if (
            None in splits
            or len(splits) == 1
            or len({one.length for one in each}) != 1
            or any(one.shard is None or one.shard[1] != len(each) for one in each)
            or not same_data(passes)
        ):
            continue
        first = each[0]
        at = first.record.split or first.made
        yield Finding(
            code="DDP110",
            about=str(at),
            severity=Severity.ERROR,
            message=f"the data set was split differently on each rank at {at}, so that one rank "
            f"may train on samples that another validates on",
            ranks=tuple(passes),
            location=at,
            evidence=(
                *(
                    f"rank {one.rank}: {one.length} of {one.whole} samples, indices' "
                    f"hash {one.record.subset or 0:x}"
                    for one in each[:4]
                ),
                f"read at {first.read}",
            ),
            fix="Pass generator=torch.Generator().manual_seed(0) to random_split, or seed all "
            "ranks alike before the split.",
        )
        return


@rule("DDP103", "missing-set-epoch", Severity.WARNING)
def order_repeated(run: Run) -> Iterator[Finding]:
    """Every epoch draws the same samples in the same order.

    What it finds
        A shuffling sampler with a `set_epoch` method that gave a training loader exactly the same
        samples in the same order in two consecutive passes. An iterable data set that shuffles, or
        whose epoch the job set, and whose first batches had the same content in two passes.

    Why it is bad
        `DistributedSampler` derives the order from its seed and the epoch number only. If the
        number does not change, every epoch repeats the same batches, and no rank ever sees the
        other ranks' samples.

    How to fix it
        Call `set_epoch(epoch)` on the sampler that the loader uses, before the loop over the
        loader. Workers have a copy of the data set: a persistent worker never sees a new epoch.
        Share it (`torch.tensor(0).share_memory_()`), or let new workers begin each pass.

    Example
        Wrong:
            for epoch in range(9):
                train(loader)
        Right:
            for epoch in range(9):
                sampler.set_epoch(epoch)
                train(loader)

    When it stays silent
        With `shuffle=False`, for samples in ascending order, for samplers without `set_epoch`, in
        the first epoch, for evaluation loaders, and if the order changed in any other way. For
        iterable data that is not shuffled, or that is augmented at random in all its parts.
    """
    yield from _streams_repeated(run)
    compared: dict[object, dict[int, tuple[Pass, Pass] | None]] = {}
    for rank in run.last:
        for place, passes in _by_loader(rank).items():
            pair = next((each for each in pairwise(passes) if _comparable(*each)), None)
            if pair is not None:
                compared.setdefault(place, {})[rank.rank] = pair if _repeats(*pair) else None
    for found in compared.values():
        sick = {number: pair for number, pair in found.items() if pair is not None}
        if len(found) < len(run.last) or not sick:
            continue
        before, again = sick[min(sick)]
        at, epoch, sampler = again.read, again.sampler.epoch, again.sampler.name or "no sampler"
        evidence = [
            f"passes {before.record.number + 1} and {again.record.number + 1} over it gave "
            f"the same {beginning(before, again)[0]} samples first, in the same order",
            f"{sampler} built at {again.at}",
        ]
        if epoch is not None:
            evidence.append(f"its epoch was {before.sampler.epoch}, then {epoch}")
        whose = "every rank" if len(sick) == len(run.last) else named(sick)
        yield Finding(
            code="DDP103",
            about=str(at),
            severity=Severity.WARNING,
            message=f"{whose} draws the same samples in the same order in each epoch at {at}: "
            f"set_epoch does not reach the loader's {sampler}",
            ranks=tuple(sorted(sick)),
            location=at,
            evidence=tuple(evidence),
            fix="Call set_epoch(epoch) with the epoch's number, on the sampler of this loader, at "
            "the top of the epoch loop.",
        )


def _by_loader(rank: Rank) -> dict[object, list[Pass]]:
    """Return a rank's passes by loader."""
    loaders: dict[object, list[Pass]] = {}
    for one in passes_of(rank):
        loaders.setdefault(one.place, []).append(one)
    return loaders


def _streams_repeated(run: Run) -> Iterator[Finding]:
    """Yield findings for loaders of iterable data whose passes begin with the same samples."""
    found: dict[object, list[tuple[Pass, Pass] | None]] = {}
    for rank in run.last:
        for place, passes in _by_loader(rank).items():
            pair = next((each for each in pairwise(passes) if _may_repeat(*each)), None)
            if pair is not None:
                found.setdefault(place, []).append(pair if _same_stream(*pair) else None)
    for each in found.values():
        pairs = [pair for pair in each if pair is not None]
        # A rank without budget may not record the second pass.
        if len(pairs) < len(each) or (len(pairs) < len(run.last) and not run.over):
            continue
        before, again = pairs[0]
        one, other = before.record, again.record
        kept = one.data_epoch != other.data_epoch
        ranks = tuple(pair[0].rank for pair in pairs)
        yield Finding(
            code="DDP103",
            about=str(again.read),
            severity=Severity.WARNING,
            message=f"{'every rank' if len(pairs) == len(run.last) else named(ranks)} gets the "
            f"same samples in the same order in each epoch at {again.read}: "
            + (
                "the epoch that the job sets does not reach the loader's persistent workers"
                if kept
                else f"{one.dataset} shuffles in the same way in each pass"
            ),
            ranks=ranks,
            location=again.made,
            evidence=(
                f"passes {one.number + 1} and {other.number + 1} over it began with the same "
                f"{len(other.rows)} samples, by their content",
                *([f"the epoch was {one.data_epoch}, then {other.data_epoch}"] if kept else []),
                f"data set {one.dataset}, {one.workers} workers"
                + (", which are kept between passes" if one.persistent else ""),
            ),
            fix="Workers have a copy of the data set: keep the epoch in shared memory "
            "(torch.tensor(0).share_memory_()), or leave out persistent_workers=True."
            if kept
            else "Call set_epoch(epoch) of the data set before each pass if it has one (Hugging "
            "Face's do), or seed the shuffling from an epoch that reaches the workers.",
        )
        return


def _may_repeat(before: Pass, again: Pass) -> bool:
    """Return whether two passes over iterable data follow each other and should differ."""
    one, other = before.record, again.record
    kept = one.persistent and one.data_epoch is not None and other.data_epoch is not None
    return (
        one.iterable
        and before.trains
        and again.trains
        and one.in_order
        and other.number == one.number + 1
        and min(len(one.rows), len(other.rows)) >= MIN_SAMPLES
        and (one.shuffles or (kept and one.data_epoch != other.data_epoch))
    )


def _same_stream(before: Pass, again: Pass) -> bool:
    """Return whether two passes began with the same samples, or the same part of each sample."""
    count = min(len(before.record.rows), len(again.record.rows))
    rows = (*before.record.rows[:count], *again.record.rows[:count])
    # Labels with few values may be equal by chance, or in randomly augmented data.
    return any(
        column[:count] == column[count:] and 2 * len(set(column[:count])) > count
        for column in list(zip(*rows, strict=False))[1:]
    )


def _comparable(before: Pass, again: Pass) -> bool:
    """Return whether two passes follow each other with the same shuffling sampler."""
    sampler = before.sampler
    return (
        before.trains
        and again.trains
        and again.record.number == before.record.number + 1
        and sampler.id is not None
        and sampler.id == again.sampler.id
        and sampler.set_epoch
        and sampler.shuffle is not False
        and beginning(before, again)[0] >= MIN_SAMPLES
        and 0.2 < before.record.falls / max(1, before.record.draws) < 0.9
    )


def _repeats(before: Pass, again: Pass) -> bool:
    """Return whether the second pass has the order of the first one."""
    one, other = before.record, again.record
    if one.state == other.state == "ended" and one.draws == other.draws:
        return one.order == other.order
    return beginning(before, again)[1]
