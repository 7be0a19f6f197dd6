"""Rules for scripts that ignore their launcher's settings (DDP206, DDP214)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import DATA_PARALLEL_AFTER, DataParallelRecord, LocalRankRecord
from ddpdoctor.run.snapshot import Rank, Run

R = TypeVar("R", bound=Record)


def _first(run: Run, declared: type[R]) -> list[tuple[Rank, R]]:
    """Return each rank's first record of a class, for ranks that have one."""
    firsts = ((rank, rank.records.first(declared)) for rank in run.last)
    return [(rank, record) for rank, record in firsts if record is not None]


def _all_wrote(run: Run, found: list[tuple[Rank, R]], step: int) -> bool:
    """Return whether each other rank would have written its record before this step's line."""
    if run.exit_status is not None:
        return True
    have = {rank.rank for rank, _ in found}
    others = [rank for rank in run.last if rank.rank not in have]
    return len(run.last) >= run.world_size and all(
        rank.ended is not None
        or rank.exit is not None
        or (bool(rank.steps) and rank.steps[-1].step >= step)
        for rank in others
    )


@rule("DDP206", "local-rank-never-filled", Severity.WARNING)
def local_rank_never_filled(run: Run) -> Iterator[Finding]:
    """The script reads its local rank from an option that torchrun does not set.

    What it finds
        An `args.local_rank` that differs from LOCAL_RANK when the model is wrapped in DDP, in a
        script that uses it.

    Why it is bad
        The option has its default value on every rank: all ranks use GPU 0, or all take themselves
        for the first one.

    How to fix it
        Read the environment: `int(os.environ["LOCAL_RANK"])`.

    Example
        Wrong:
            parser.add_argument("--local_rank", type=int, default=0)
        Right:
            default = int(os.environ.get("LOCAL_RANK", 0))
            parser.add_argument("--local_rank", type=int, default=default)

    When it stays silent
        If the script sets the right value before it creates DDP, and if it never reads the option.
    """
    found = _first(run, LocalRankRecord)
    if not found or not _all_wrote(run, found, 0):
        return
    _, record = found[0]
    ranks = tuple(sorted(rank.rank for rank, _ in found))
    yield Finding(
        code="DDP206",
        severity=Severity.WARNING,
        message=f"{named(ranks)} parsed local rank {record.parsed}: torchrun "
        "fills LOCAL_RANK, not an option",
        ranks=ranks,
        location=record.location,
        evidence=tuple(
            f"rank {rank.rank}: args.local_rank is {each.parsed}, LOCAL_RANK is {each.environment}"
            for rank, each in found[:4]
        )
        + ((f"the script uses it at {record.used}",) if record.used is not None else ()),
        fix='Read int(os.environ["LOCAL_RANK"]), for example as the default of the option.',
        about="local_rank",
    )


@rule("DDP214", "data-parallel-under-a-launcher", Severity.WARNING)
def data_parallel(run: Run) -> Iterator[Finding]:
    """`nn.DataParallel` is used in a job of several processes.

    What it finds
        A `torch.nn.DataParallel` created on a rank of a job with several ranks, and no DDP.

    Why it is bad
        DataParallel does not communicate with other processes: each trains a separate model on its
        data, and gradients are not averaged.

    How to fix it
        Wrap the model in `DistributedDataParallel` instead.

    Example
        Wrong: `model = nn.DataParallel(model)` under torchrun.
        Right: `model = DistributedDataParallel(model, device_ids=[local_rank])`

    When it stays silent
        For a single process, and for ranks that also create a DDP module. In a running job, before
        the 16th step.
    """
    found = [
        (rank, record)
        for rank, record in _first(run, DataParallelRecord)
        if rank.opened.world_size > 1 and rank.watched(DdpRecord) and not rank.records.of(DdpRecord)
    ]
    if not found or not _all_wrote(run, found, DATA_PARALLEL_AFTER):
        return
    _, record = found[0]
    world = found[0][0].opened.world_size
    yield Finding(
        code="DDP214",
        severity=Severity.WARNING,
        message=f"nn.DataParallel in a job of {world} processes: each trains its own model",
        ranks=tuple(sorted(rank.rank for rank, _ in found)),
        location=record.location,
        evidence=(f"built on {len(found)} ranks; none of them built a DDP",),
        fix="Use torch.nn.parallel.DistributedDataParallel, which averages gradients over ranks.",
        about="data_parallel",
    )
