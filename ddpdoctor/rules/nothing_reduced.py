"""Training without DDP (DDP326): ranks that share a group and no gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ddpdoctor.analysis.draws import Pass, location, passes_of
from ddpdoctor.analysis.replicas import list_of, site
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.rules.unreduced import GRADIENTS_DIFFER
from ddpdoctor.run.record import Record, integer
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
    world = max((integer(rank.opened, "world_size") for rank in ranks), default=0)
    if world < 2 or len(ranks) != world:
        return
    if any(any(rank.of_kind(kind)) for rank in ranks for kind in ("ddp", "data_parallel")):
        # Evidence, not another finding: what is wrapped in nn.DataParallel is meant to be reduced.
        return
    looks = _looks(ranks)
    if len(looks) < LOOKS or not _settled(run, max(looks)):
        return
    first, last = looks[min(looks)], looks[max(looks)]
    if not _one_training(looks.values()) or _exchanged(ranks) or _kept_apart(ranks):
        return
    apart = [step for step in sorted(looks) if _differ(looks[step], "gradients")]
    moved = [step for step in sorted(looks)[1:] if _differ(looks[step], "values")]
    if len(apart) != len(looks) or len(moved) != len(looks) - 1:
        return
    meant = list(_meant(ranks, first))
    if not meant and not all(map(_unused, ranks)):
        # Trials of one search, say, that only meet to hand in their results.
        return
    everyone = tuple(rank.rank for rank in ranks)
    at = site(ranks[0], "optimizer")
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
            f"gradients of {last[0].get('optimizer')} before the step {max(looks)}: norm "
            + _listed(ranks, last, "gradients"),
            f"the parameters that belong to them: norm {_listed(ranks, last, 'values')}",
            "no DistributedDataParallel was built, and no collective carried as much as a gradient",
        ),
        fix="Wrap the model in DistributedDataParallel before training, or all-reduce the "
        "gradients before each optimizer step.",
    )


Looks = dict[int, list[Record]]
"""By step, what each rank wrote."""


def _looks(ranks: Sequence[Rank]) -> Looks:
    told = [{integer(each, "step"): each for each in rank.of_kind("solo")} for rank in ranks]
    return {step: [each[step] for each in told] for step in set.intersection(*map(set, told))}


def _settled(run: Run, last: int) -> bool:
    """Whether an average would have been taken by now, if there were one now and then."""
    if run.exit_status == 0:
        return True
    if last < LONG:
        return False
    epochs = [[one for one in passes_of(rank) if one.trains] for rank in run.last]
    return all(
        any(one.closed for one in each) and any(one.number("number") > 0 for one in each)
        for each in epochs
    )


def _one_training(looks: Iterable[list[Record]]) -> bool:
    """Whether all ranks train the same kind of model in the same way."""
    keys = ("optimizer", "shapes", "parameters", "elements", "hyper")
    return all(
        all(record.get(key) == records[0].get(key) for record in records)
        for records in looks
        for key in keys
    )


def _exchanged(ranks: Sequence[Rank]) -> bool:
    """Whether parameters or gradients may have gone from rank to rank."""
    for rank in ranks:
        told = [*rank.of_kind("solo"), *rank.of_kind("solo_end")]
        before = integer(told[0], "before")
        for record in told:
            if record.get("wide") != before or record.get("outside") or record.get("wrapped"):
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


def _kept_apart(ranks: Sequence[Rank]) -> bool:
    """Whether each rank saves a file of its own."""
    files = [{str(record.get("file")) for record in rank.of_kind("save")} for rank in ranks]
    return all(
        mine and all(mine.isdisjoint(other) for other in files if other is not mine)
        for mine in files
    )


def _norms(record: Record, key: str) -> list[float]:
    return [value for value in list_of(record, key) if isinstance(value, (int, float))]


def _differ(records: list[Record], key: str) -> bool:
    """Whether no two ranks have the same, of some tensor."""
    for values in zip(*(_norms(record, key) for record in records), strict=False):
        high = max(map(abs, values))
        apart = high > 0 and (max(values) - min(values)) / high > GRADIENTS_DIFFER
        if apart and len(set(values)) == len(records):
            return True
    return False


def _meant(ranks: Sequence[Rank], first: list[Record]) -> Iterator[str]:
    """What says that the ranks were to train one model."""
    passes = [one for rank in ranks for one in passes_of(rank)]
    idle = next((place for one in passes for place in one["idle"] or ()), None)
    if idle is not None:
        yield f"the DistributedSampler built at {location(idle)} was handed to no loader"
    sampled = next((one for one in passes if one.trains and _shares_out(one, len(ranks))), None)
    if sampled is not None:
        yield f"the sampler built at {sampled.at} gives each rank its part of the data"
    if _same(first, "values"):
        yield f"before step {first[0].get('step')} the parameters were the same on all ranks"
    if all(_reduces(rank) for rank in ranks):
        yield "other numbers are reduced over the ranks"


def _same(records: list[Record], key: str) -> bool:
    return bool(_norms(records[0], key)) and all(
        _norms(record, key) == _norms(records[0], key) for record in records
    )


def _shares_out(one: Pass, world: int) -> bool:
    return one.shard is not None and one.shard[1] == world


def _reduces(rank: Rank) -> bool:
    return rank.ring is not None and any(each.name in REDUCTIONS for each in rank.ring.collectives)


def _steps(ranks: Sequence[Rank], looked: int) -> int:
    ends = [integer(record, "steps") for rank in ranks for record in rank.of_kind("solo_end")]
    return max(min(ends, default=0), looked)


def _listed(ranks: Sequence[Rank], records: list[Record], key: str) -> str:
    values = [(_norms(record, key), rank.rank) for rank, record in zip(ranks, records, strict=True)]
    column = next(
        index for index in range(len(values[0][0])) if len({each[index] for each, _ in values}) > 1
    )
    return ", ".join(f"{each[column]:.6g} on rank {rank}" for each, rank in values[:4])
