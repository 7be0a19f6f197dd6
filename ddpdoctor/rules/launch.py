"""Launch (DDP2xx): scripts that do not take the place that their launcher gives them."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Location, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.run.record import Record, integer
from ddpdoctor.run.snapshot import Rank, Run


def _location(record: Record) -> Location | None:
    return Location(str(record["path"]), integer(record, "line")) if record.get("path") else None


def _first(run: Run, kind: str) -> list[tuple[Rank, Record]]:
    """The first record of a kind, of each rank that has one."""
    firsts = ((rank, next(rank.of_kind(kind), None)) for rank in run.last)
    return [(rank, record) for rank, record in firsts if record is not None]


def _use(record: Record) -> tuple[str, ...]:
    used = record.get("used")
    if not isinstance(used, list) or len(used) != 2 or not isinstance(used[1], int):
        return ()
    return (f"the script uses it at {Location(str(used[0]), used[1])}",)


@rule("DDP206", "local-rank-never-filled", Severity.WARNING)
def local_rank_never_filled(run: Run) -> Iterator[Finding]:
    """The script reads its local rank from an option that torchrun does not set.

    What it finds
        An `args.local_rank` that differs from LOCAL_RANK when the model is wrapped in DDP, in a
        script that uses it.

    Why it is bad
        The option has its default value on every rank: all ranks use GPU 0, or all consider
        themselves the first one.

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
    found = _first(run, "local_rank")
    if not found:
        return
    _, record = found[0]
    told = integer(record, "parsed")
    ranks = tuple(sorted(rank.rank for rank, _ in found))
    yield Finding(
        code="DDP206",
        severity=Severity.WARNING,
        message=f"{named(ranks)} parsed local rank {told}: torchrun "
        "fills LOCAL_RANK, not an option",
        ranks=ranks,
        location=_location(record),
        evidence=tuple(
            f"rank {rank.rank}: args.local_rank is {integer(each, 'parsed')}, LOCAL_RANK is "
            f"{integer(each, 'environment')}"
            for rank, each in found[:4]
        )
        + _use(record),
        fix='Read int(os.environ["LOCAL_RANK"]), for example as the default of the option.',
        about="local_rank",
    )


@rule("DDP214", "data-parallel-under-a-launcher", Severity.WARNING)
def data_parallel(run: Run) -> Iterator[Finding]:
    """`nn.DataParallel` is used in a job of several processes.

    What it finds
        A `torch.nn.DataParallel` created on a rank of a job with several ranks, where no DDP is
        created.

    Why it is bad
        DataParallel does not communicate with other processes: each trains a separate model on its
        data, and gradients are not averaged.

    How to fix it
        Wrap the model in `DistributedDataParallel` instead.

    Example
        Wrong: `model = nn.DataParallel(model)` under torchrun.
        Right: `model = DistributedDataParallel(model, device_ids=[local_rank])`

    When it stays silent
        For a single process, and for ranks that also create a DDP.
    """
    found = [
        (rank, record)
        for rank, record in _first(run, "data_parallel")
        if integer(rank.opened, "world_size", 1) > 1 and next(rank.of_kind("ddp"), None) is None
    ]
    if not found:
        return
    _, record = found[0]
    world = integer(found[0][0].opened, "world_size")
    yield Finding(
        code="DDP214",
        severity=Severity.WARNING,
        message=f"nn.DataParallel in a job of {world} processes: each trains its own model",
        ranks=tuple(sorted(rank.rank for rank, _ in found)),
        location=_location(record),
        evidence=(f"built on {len(found)} ranks; none of them built a DDP",),
        fix="Use torch.nn.parallel.DistributedDataParallel, which averages gradients over ranks.",
        about="data_parallel",
    )
