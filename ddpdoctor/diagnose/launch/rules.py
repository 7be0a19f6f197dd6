"""Rules for the launch (DDP206, DDP214), and why ranks do not leave ``init_process_group``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.diagnose.crashes import resource_errors
from ddpdoctor.diagnose.hangs.hang_snapshot import HangSnapshot, RankState
from ddpdoctor.diagnose.hangs.process_activity import lacks_cpu, starves, works
from ddpdoctor.diagnose.hangs.rank_activity import Activity, activity_of, came_since
from ddpdoctor.diagnose.source_files import quoted
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import DATA_PARALLEL_AFTER, DataParallelRecord, LocalRankRecord
from ddpdoctor.run.snapshot import Rank, Run

# -- launch (DDP2xx): scripts that do not take the place that their launcher gives them


R = TypeVar("R", bound=Record)


def _first(run: Run, declared: type[R]) -> list[tuple[Rank, R]]:
    """The first record of a class, of each rank that has one."""
    firsts = ((rank, rank.records.first(declared)) for rank in run.last)
    return [(rank, record) for rank, record in firsts if record is not None]


def _all_wrote(run: Run, found: list[tuple[Rank, R]], step: int) -> bool:
    """Whether each other rank would have such a record by now: ranks write at their own pace.

    Args:
        run: The run.
        found: The ranks that have one.
        step: The step whose line stands behind it in the journal.
    """
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
        For a single process, and for ranks that also create a DDP. In a running job, before the
        16th step.
    """
    found = [
        (rank, record)
        for rank, record in _first(run, DataParallelRecord)
        if rank.opened.world_size > 1 and not rank.records.of(DdpRecord)
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


# -- why no rank comes out of ``init_process_group`` (DDP813, DDP814): who is late, or missing


CHECK_NETWORK = (
    "Check the network and the interface that the backend took "
    "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says)."
)

_START = (
    "Start the missing ranks, or correct the world size; all need the same address and port, and a "
    "network that lets them through."
)

ALLOWED = 1.5
"""How many times the CPU time of those that have come a rank may need to come, too."""

Seen = Sequence[tuple[RankState, Activity]]


def before_joining(run: Run, still: HangSnapshot) -> Iterator[Finding]:
    """No rank has come out of ``init_process_group``."""
    seen = [(rank, activity_of(rank, True)) for rank in still.ranks]
    joining = [(rank, each) for rank, each in seen if each.code == "DDP813"]
    others = [(rank, each) for rank, each in seen if each.code != "DDP813"]
    late = [(rank, each) for rank, each in others if _is_late(rank, joining, still)]
    if joining and late:
        yield from _late(late, [rank for rank, _ in joining], still)
    elif any(rank.dead_for is None for rank, _ in others):
        # They are on their way, or do not say where they are.
        return
    elif joining and (still.record.launcher_works or any(works(rank) for rank, _ in joining)):
        # They import what they need, say; or the store of the launcher has no core to answer on.
        return
    elif joining:
        yield _all_there(joining, still) if _all_come(still) else _missing(run, joining, still)
    elif not still.ranks:
        yield from _torchrun_alone(run, still)


def _is_late(rank: RankState, joining: Seen, still: HangSnapshot) -> bool:
    """Whether a rank does something else, with the time and the core to have come."""
    limit = still.record.limit
    if rank.frame is None or came_since(rank) or lacks_cpu(rank, limit):
        return False
    # Before it is a rank, only this tells what it had of the cores: what the others needed.
    needed = max((peer.activity("ran") for peer, _ in joining), default=0.0)
    return not starves(rank) or rank.activity("ran") >= ALLOWED * max(needed, limit)


def _all_there(joining: Seen, still: HangSnapshot) -> Finding:
    rank, each = joining[0]
    return Finding(
        code="DDP814",
        about="all there",
        severity=Severity.WARNING,
        message=f"all ranks have been in init_process_group for {still.seconds:.0f} s and "
        "it does not end: the network between them, or the backend"
        if len(joining) > 1
        else f"rank {rank.rank} has been in init_process_group for {still.seconds:.0f} s, alone as "
        "its world size says, and it does not end: the store, or the backend",
        ranks=tuple(rank.rank for rank, _ in joining),
        location=each.location,
        fix=CHECK_NETWORK,
        traceback=rank.traceback,
    )


def _missing(run: Run, joining: Seen, still: HangSnapshot) -> Finding:
    """Fewer ranks are there than the world size says, or no rank opens the store."""
    rank, each = joining[0]
    who = named([rank.rank for rank, _ in joining])
    verb = "wait" if len(joining) > 1 else "waits"
    missing, fix, evidence = "ranks that never came", _START, _launched(run)
    store = resource_errors.unopened_store(run)
    if store is not None:
        missing = f"a store at {resource_errors.store_address(store)} that no rank opens"
        fix, evidence = resource_errors.store_advice(store)
    return Finding(
        code="DDP813",
        about="rendezvous",
        severity=Severity.ERROR,
        message=f"{who} {verb} in init_process_group at {quoted(each.location)} for "
        f"{missing}, for {still.seconds:.0f} s",
        ranks=tuple(rank.rank for rank, _ in joining),
        location=each.location,
        evidence=evidence,
        fix=fix,
        traceback=rank.traceback,
    )


def _torchrun_alone(run: Run, still: HangSnapshot) -> Iterator[Finding]:
    """Torchrun has started no rank, since it waits for other nodes."""
    nodes = _option(run, "--nnodes")
    if run.manifest.get("launcher") == "torchrun" and nodes not in (None, "1"):
        yield Finding(
            code="DDP813",
            about="rendezvous",
            severity=Severity.ERROR,
            message=f"torchrun has waited in rendezvous for {still.seconds:.0f} s: of "
            f"{nodes} nodes, not all have come",
            evidence=_launched(run),
            fix="Start the command on every node, with the same --nnodes, --rdzv-id and "
            "--rdzv-endpoint (or --master-addr), each with its own --node-rank; check that the "
            "endpoint can be reached from there.",
        )


def _all_come(still: HangSnapshot) -> bool:
    """Whether as many ranks are in ``init_process_group`` as it was called for."""
    asked = {rank.stacks.world_size for rank in still.ranks if rank.stacks is not None}
    return 0 not in asked and max(asked, default=0) in range(1, len(still.ranks) + 1)


def _late(late: Seen, joining: Sequence[RankState], still: HangSnapshot) -> Iterator[Finding]:
    """Ranks that have not come to ``init_process_group`` yet, where others wait for them."""
    waits = f"{named([r.rank for r in joining])} {'wait' if len(joining) > 1 else 'waits'}"
    for rank, each in late[:3]:
        unknown = each.code == "DDP802"
        text = f"has not come to init_process_group: it {each.text}" if unknown else each.text
        yield Finding(
            code=each.code,
            about=f"late {rank.rank}",
            # It may wait for a lock or a file that will come; nothing was ever done together.
            severity=min(each.severity, Severity.WARNING) if unknown else each.severity,
            message=f"rank {rank.rank} {text}; {waits} for it in init_process_group for "
            f"{still.seconds:.0f} s, at {quoted(joining[0].site)}",
            ranks=(rank.rank,),
            location=each.location,
            evidence=each.evidence,
            fix=each.fix
            or "Let all ranks join first, or prepare the data before the job starts; the others' "
            "timeout runs.",
            traceback=rank.traceback,
        )


def _launched(run: Run) -> tuple[str, ...]:
    words = ("--nnodes", "--nproc-per-node", "--node-rank", "--rdzv-endpoint", "--master-addr")
    seen = [f"{word} {value}" for word in words if (value := _option(run, word)) is not None]
    return (f"started with {' '.join(seen)}",) if seen else ()


def _option(run: Run, name: str) -> str | None:
    """The value of torchrun's option, in either spelling."""
    command = run.manifest.get("command")
    words = list(map(str, command)) if isinstance(command, list) else []
    for spelling in (name, name[:2] + name[2:].replace("-", "_")):
        for at, word in enumerate(words):
            if word == spelling and at + 1 < len(words):
                return words[at + 1]
            if word.startswith(f"{spelling}="):
                return word.partition("=")[2]
    return None
