"""Training without DDP (DDP326): ranks that share a group and no gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ddpdoctor.analysis.draws import Pass, passes_of
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.rules.unreduced import GRADIENTS_DIFFER
from ddpdoctor.run.records.data import SaveRecord
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import DataParallelRecord
from ddpdoctor.run.records.replicas import SoloEndRecord, SoloRecord
from ddpdoctor.run.snapshot import Rank, Run

LOOKS = 4
"""Steps of which all ranks have to have written."""

LONG = 1024
"""Steps after which a job that runs on is taken not to average its models now and then."""

REDUCTIONS = ("all_reduce", "reduce")


@rule("DDP326", "nothing-reduced", Severity.ERROR)
def nothing_reduced(run: Run) -> Iterator[Finding]:
    """Each rank trains a separate model: gradients and parameters are never exchanged.

    What it finds
        Ranks of one process group that all train a model of the same shape without
        DistributedDataParallel. Gradients and parameters differ between ranks, and no collective
        carried more than a few numbers. An error if the job shards its data (a DistributedSampler),
        starts from equal weights, or reduces numbers over the ranks; a warning if the group is not
        used for anything.

    Why it is bad
        N ranks train N models, each on a part of the data. The saved model has learned from rank
        0's part only.

    How to fix it
        Wrap the model before training.

    Example
        Wrong:
            dist.init_process_group("nccl")
            model = Net().cuda()
        Right:
            dist.init_process_group("nccl")
            model = DistributedDataParallel(Net().cuda())

    When it stays silent
        If any rank uses DDP or sharded parameters. For gradients or parameters that are averaged by
        hand, even occasionally. If models or hyper-parameters differ between ranks, if each rank
        saves a separate file, or if only some ranks train: then separate models are intended. In a
        running job, before its 1,024th step and its second epoch.
    """
    ranks = run.last
    if run.world_size < 2 or len(ranks) != run.world_size:
        return
    if any(rank.records.of(DdpRecord) or rank.records.of(DataParallelRecord) for rank in ranks):
        # Evidence, not another finding: what is wrapped in nn.DataParallel is meant to be reduced.
        return
    looks = _looks(ranks)
    if len(looks) < LOOKS or not _settled(run, max(looks)):
        return
    if not _one_training(looks.values()) or _exchanged(ranks) or _separate_files(ranks):
        return
    if not _diverge(looks):
        return
    first, last = looks[min(looks)], looks[max(looks)]
    meant = list(_meant(ranks, first))
    if not meant and not all(map(_unused, ranks)):
        # Trials of one search, say, that only meet to hand in their results.
        return
    everyone = tuple(rank.rank for rank in ranks)
    at = ranks[0].site("optimizer")
    yield Finding(
        code="DDP326",
        about="nothing reduced",
        severity=Severity.ERROR if meant else Severity.WARNING,
        message=f"each rank trains its own model: {named(everyone)} share a process group, and no "
        f"gradient was reduced in {_steps(ranks, max(looks))} steps",
        ranks=everyone,
        location=at,
        evidence=(
            *meant,
            *(["the process group is not used for anything"] if not meant else []),
            f"gradients of {last[0].optimizer} before the step {max(looks)}: norm "
            + _listed(ranks, _gradients(last)),
            f"the parameters that belong to them: norm {_listed(ranks, _values(last))}",
            "no DistributedDataParallel was built, and no collective carried as much as a gradient",
        ),
        fix="Wrap the model in DistributedDataParallel before training, or all-reduce the "
        "gradients before each optimizer step.",
    )


def _diverge(looks: Looks) -> bool:
    """Whether all gradients differ between ranks, and so do all parameters but the first."""
    first = min(looks)
    return all(
        _differ(_gradients(records)) and (step == first or _differ(_values(records)))
        for step, records in looks.items()
    )


Looks = dict[int, list[SoloRecord]]
"""By step, what each rank wrote."""


def _looks(ranks: Sequence[Rank]) -> Looks:
    found = [{each.step: each for each in rank.records.of(SoloRecord)} for rank in ranks]
    return {step: [each[step] for each in found] for step in set.intersection(*map(set, found))}


def _gradients(records: Sequence[SoloRecord]) -> list[tuple[float, ...]]:
    return [each.gradients for each in records]


def _values(records: Sequence[SoloRecord]) -> list[tuple[float, ...]]:
    return [each.values for each in records]


def _settled(run: Run, last: int) -> bool:
    """Whether an average would have been taken by now, if there were one now and then."""
    # The end of each rank tells what was exchanged after its last look.
    if run.exit_status == 0 and all(rank.records.of(SoloEndRecord) for rank in run.last):
        return True
    if last < LONG:
        return False
    epochs = [[one for one in passes_of(rank) if one.trains] for rank in run.last]
    return all(
        any(one.closed for one in each) and any(one.record.number > 0 for one in each)
        for each in epochs
    )


def _one_training(looks: Iterable[list[SoloRecord]]) -> bool:
    """Whether all ranks train the same kind of model in the same way."""
    return all(
        len(
            {
                (each.optimizer, each.shapes, each.parameters, each.elements, each.hyper)
                for each in one
            }
        )
        == 1
        for one in looks
    )


def _exchanged(ranks: Sequence[Rank]) -> bool:
    """Whether parameters or gradients may have gone from rank to rank."""
    for rank in ranks:
        looks, ends = rank.records.of(SoloRecord), rank.records.of(SoloEndRecord)
        if rank.lost:
            return True
        before = looks[0].before
        if any(each.wide != before or each.outside for each in looks):
            return True
        if any(each.wide != before or each.outside or each.wrapped for each in ends):
            return True
        # Compiled code calls collectives itself.
        if rank.ring is None or rank.ring.partial:
            return True
    return False


def _unused(rank: Rank) -> bool:
    """Whether a rank never called a collective, but to wait for the others."""
    ring = rank.ring
    return (
        ring is not None
        and ring.calls == len(ring.collectives)
        and all("barrier" in each.name for each in ring.collectives)
    )


def _separate_files(ranks: Sequence[Rank]) -> bool:
    """Whether each rank saves its own file."""
    files = [{record.file for record in rank.records.of(SaveRecord)} for rank in ranks]
    return all(
        mine and all(mine.isdisjoint(other) for other in files if other is not mine)
        for mine in files
    )


def _differ(norms: list[tuple[float, ...]]) -> bool:
    """Whether no two ranks have the same norm, of some tensor."""
    for values in zip(*norms, strict=False):
        high = max(map(abs, values))
        differ = high > 0 and (max(values) - min(values)) / high > GRADIENTS_DIFFER
        if differ and len(set(values)) == len(norms):
            return True
    return False


def _meant(ranks: Sequence[Rank], first: list[SoloRecord]) -> Iterator[str]:
    """What says that the ranks were to train one model."""
    passes = [one for rank in ranks for one in passes_of(rank)]
    idle = next((place for one in passes for place in one.record.idle), None)
    if idle is not None:
        yield f"the DistributedSampler built at {idle} was handed to no loader"
    sampled = next((one for one in passes if one.trains and _shares_out(one, len(ranks))), None)
    if sampled is not None:
        yield f"the sampler built at {sampled.at} gives each rank its part of the data"
    if first[0].values and len(set(_values(first))) == 1:
        yield f"before step {first[0].step} the parameters were the same on all ranks"
    if all(_reduces(rank) for rank in ranks):
        yield "other numbers are reduced over the ranks"


def _shares_out(one: Pass, world: int) -> bool:
    return one.shard is not None and one.shard[1] == world


def _reduces(rank: Rank) -> bool:
    return rank.ring is not None and any(each.name in REDUCTIONS for each in rank.ring.collectives)


def _steps(ranks: Sequence[Rank], looked: int) -> int:
    ends = [record.steps for rank in ranks for record in rank.records.of(SoloEndRecord)]
    return max(min(ends, default=0), looked)


def _listed(ranks: Sequence[Rank], norms: list[tuple[float, ...]]) -> str:
    """The norms of the first tensor that has not the same one everywhere."""
    column = next(each for each in zip(*norms, strict=False) if len(set(each)) > 1)
    shown = list(zip(column, ranks, strict=True))[:4]
    return ", ".join(f"{norm:.6g} on rank {rank.rank}" for norm, rank in shown)
