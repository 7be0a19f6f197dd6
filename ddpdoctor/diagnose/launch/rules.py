"""Rules for scripts that ignore their launcher's settings, and for nodes.

These are DDP206 and DDP214, and for nodes that differ or are lost DDP052, DDP056, DDP057, DDP058
and DDP215. The first four of them are also checks of `ddpdoctor check`, which have the pages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import duration, named
from ddpdoctor.core.relations import Lapsed, certain
from ddpdoctor.diagnose.hangs.job_nodes import job_nodes
from ddpdoctor.diagnose.launch.node_differences import (
    CLOCK_FAIL_S,
    CLOCK_WARN_S,
    OF_EACH_NODE,
    minor,
)
from ddpdoctor.run import code_version
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import DATA_PARALLEL_AFTER, DataParallelRecord, LocalRankRecord
from ddpdoctor.run.records.supervisor import LinkRecord, NodeRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.vitals import gpu_counts

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


# -- nodes that differ or are lost


LOST_FOR_NS = 5_000_000_000
"""Nanoseconds from detecting the loss of a node, which takes 10 s, to the report."""

MAX_HOSTS = 5  # Maximum number of hosts to name

_VERSIONS = {
    "torch": "torch",
    "nccl": "NCCL",
    "cuda": "CUDA",
    "driver": "the NVIDIA driver",
    "python": "Python",
}


@rule("DDP052", "clocks", Severity.WARNING)
def clocks(run: Run) -> Iterator[Finding]:
    """The clocks of the nodes differ."""
    here = _head(run)
    for node in run.nodes:
        ahead = node.ahead
        if ahead is None or abs(ahead) - node.error < CLOCK_WARN_S * 1e9:
            continue
        side = "behind" if ahead > 0 else "ahead of"
        yield Finding(
            "DDP052",
            Severity.ERROR if abs(ahead) - node.error > CLOCK_FAIL_S * 1e9 else Severity.WARNING,
            f"the clock of {node.host} is {abs(ahead) / 1e9:.1f} s {side} that of {here}",
            evidence=(f"measured with an error of at most {duration(node.error / 1e9)}",),
            fix="Let a time service run on every node (chrony, systemd-timesyncd).",
            paste="sudo timedatectl set-ntp true",
            about=f"clock {node.number}",
        )


@rule("DDP056", "link-speed", Severity.INFO)
def full_links(run: Run) -> Iterator[Finding]:
    """The ranks wait for a full link between two nodes."""
    hosts: dict[str, set[str]] = defaultdict(set)
    links: dict[tuple[str, str], list[LinkRecord]] = defaultdict(list)
    for each in run.supervisor.of(LinkRecord):
        hosts[each.source].add(each.host)
        links[each.source, each.target].append(each)
    for (source, target), found in sorted(links.items()):
        # An address that two nodes have, such as that of a container bridge, identifies neither.
        there, newest = hosts.get(target, set()), found[-1]
        known = len(there) == len(hosts[source]) == 1 and there != hosts[source]
        if not known or len(found) < 2 or not all(each.busy for each in found[-2:]):
            continue
        yield Finding(
            "DDP056",
            Severity.INFO,
            f"the link from {newest.host} to {next(iter(there))} is full: it delivers "
            f"{8e-6 * newest.rate:.0f} Mbit/s, and the ranks mostly wait",
            evidence=(
                f"{source} had data on the way to {target} for {100 * newest.busy:.0f} % of "
                f"{newest.seconds:.0f} s, round trip {1e3 * newest.rtt:.1f} ms",
            ),
            fix="Measure all links with `ddpdoctor check`. If none is slow, use another network "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or send less.",
            about=f"link {source} {target}",
        )


@rule("DDP057", "node-versions", Severity.WARNING)
def node_versions(run: Run) -> Iterator[Finding]:
    """The nodes differ in versions of torch, NCCL, CUDA, the driver or Python, or in settings."""
    ranks = [rank for rank in run.last if rank.opened.versions]
    if len({rank.opened.host for rank in ranks}) < 2:
        return
    for name, what in _VERSIONS.items():
        values = _by_value(ranks, lambda rank, name=name: _shortened(name, rank))  # type: ignore[misc]
        if name in ("nccl", "driver"):
            # A missing or unknown value is not a different version.
            values.pop("", None)
        minors = {minor(value) for value in values}
        severe = name == "nccl" or (name == "torch" and len(minors) > 1)
        severity = Severity.ERROR if severe else Severity.WARNING
        yield from _differ("DDP057", severity, f"{what} is not the same on all nodes", values)
    models = _by_value(ranks, _gpu_model)
    models.pop("", None)
    what = "the model of GPU is not the same on all nodes"
    fix = "Use the same GPUs on every node: all ranks wait for the slowest."
    yield from _differ("DDP057", Severity.INFO, what, models, fix)
    what = "the number of GPUs is not the same on all nodes"
    yield from _differ("DDP057", Severity.INFO, what, _gpu_counts(run, ranks), fix)
    names = sorted({name for rank in ranks for name in rank.opened.variables})
    for name in names:
        if not name.endswith(OF_EACH_NODE):
            values = _by_value(
                ranks,
                lambda rank, name=name: rank.opened.variables.get(name, "not set"),  # type: ignore[misc]
            )
            what = f"{name} is not the same on all nodes"
            yield from _differ("DDP057", Severity.WARNING, what, values)


@rule("DDP058", "same-code", Severity.ERROR)
def same_code(run: Run) -> Iterator[Finding]:
    """The nodes do not have the same script or commit."""
    own = code_version.read(run.path) if run.nodes else None
    if own is None or not own.script:
        return
    for node in run.nodes:
        other = code_version.read(run.path, node.number)
        if other is None or not other.script:
            continue
        facts = []
        if own.commit and other.commit and own.commit != other.commit:
            facts.append(
                f"commit {own.commit[:9]} on {_head(run)}, {other.commit[:9]} on {node.host}"
            )
        both = own.files.keys() & other.files.keys()
        changed = sorted(name for name in both if own.files[name] != other.files[name])
        if own.text != other.text and own.script.rpartition("/")[2] not in changed:
            changed.insert(0, own.script)
        if changed:
            facts.append(f"differs: {', '.join(changed[:5])}")
        if facts:
            yield Finding(
                "DDP058",
                Severity.ERROR if changed else Severity.WARNING,
                f"{node.host} does not run the same code as {_head(run)}",
                ranks=_ranks_of(run, node),
                evidence=tuple(facts),
                fix="Bring every node to the same code.",
                about=f"code {node.number}",
            )


def _responds_again(finding: Finding, run: object) -> Lapsed | None:
    return Lapsed("over", "it responds again", sure=True)


@rule(
    "DDP215", "node-lost", Severity.WARNING, supersedes={"DDP907": certain}, lapses=_responds_again
)
def node_lost(run: Run) -> Iterator[Finding]:
    """A node of the job no longer responds.

    What it finds
        A node whose ddpdoctor sent records and has been silent for 15 seconds. It is an error once
        the job has failed.

    Why it is bad
        The machine, its network or ddpdoctor on it is gone. If the machine is gone, the other ranks
        wait for its ranks until a timeout ends the job.

    How to fix it
        Check whether the machine is up and reaches the others. Once the job has ended,
        `ddpdoctor check` on all nodes shows it.

    Example
        Wrong: a machine that is rebooted for an update while a job runs on it.
        Right: it is drained first, and rebooted when its jobs have ended.

    When it stays silent
        If the node ended its job itself, or responds again. Its records from meanwhile are then
        read.
    """
    for node in run.nodes:
        if node.state == "refused":
            yield Finding(
                "DDP215",
                Severity.WARNING,
                f"the records of {node.host} are not taken: {node.why}",
                fix="Install the same ddpdoctor on every node.",
                about=f"refused {node.number}",
            )
    failed = bool(run.exit_status) and run.stopped_at is None
    # A node was already silent for some seconds when its loss was recorded.
    lost = [
        node
        for node in run.nodes
        if node.state == "lost" and (failed or run.taken - node.time > LOST_FOR_NS)
    ]
    if not lost or run.exit_status == 0:
        return
    ranks = sorted({rank for node in lost for rank in _ranks_of(run, node)})
    hosts, nodes = [node.host for node in lost], job_nodes(run)
    more = f" and {len(hosts) - MAX_HOSTS} more nodes" if len(hosts) > MAX_HOSTS else ""
    yield Finding(
        "DDP215",
        Severity.ERROR if failed else Severity.WARNING,
        f"{', '.join(hosts[:MAX_HOSTS])}{more} {'do' if len(hosts) > 1 else 'does'} not respond: "
        f"nothing newer is known of {named(ranks) if ranks else 'the ranks there'}",
        ranks=tuple(ranks),
        evidence=tuple(
            f"the link to {node.host} was lost {duration((run.taken - node.time) / 1e9)} ago"
            for node in lost[:MAX_HOSTS]
        ),
        fix=nodes.and_check(f"See whether {hosts[0]} lives and reaches {_head(run)}."),
        paste=nodes.check_line,
        about="lost nodes",
    )


def _head(run: Run) -> str:
    return str(run.manifest.get("host") or "this node")


def _ranks_of(run: Run, node: NodeRecord) -> tuple[int, ...]:
    """Return the ranks of the newest attempt on a node."""
    return tuple(rank.rank for rank in run.ranks_on(node))


def _by_value(ranks: Sequence[Rank], value: Callable[[Rank], str]) -> dict[str, list[str]]:
    """Return the hosts by the value of their ranks."""
    found: dict[str, list[str]] = {}
    for rank in ranks:
        hosts = found.setdefault(value(rank), [])
        if rank.opened.host not in hosts:
            hosts.append(rank.opened.host)
    return found


def _gpu_model(rank: Rank) -> str:
    return next((each.device_name for each in rank.records.of(DdpRecord) if each.device_name), "")


def _gpu_counts(run: Run, ranks: Sequence[Rank]) -> dict[str, list[str]]:
    """Group the nodes by their number of GPUs, if NVML shows it."""
    hosts = {rank.opened.host for rank in ranks}
    counts: dict[str, list[str]] = {}
    for host, count in gpu_counts(run.path).items():
        if host in hosts:
            counts.setdefault(str(count), []).append(host)
    return counts


def _shortened(name: str, rank: Rank) -> str:
    version = rank.opened.versions.get(name, "")
    return minor(version) if name == "python" else version


def _differ(
    code: str,
    severity: Severity,
    what: str,
    values: dict[str, list[str]],
    fix: str = "Use the same environment on every node.",
) -> Iterator[Finding]:
    hosts = Counter(host for each in values.values() for host in each)
    if len(values) < 2 or len(hosts) < 2 or any(count > 1 for count in hosts.values()):
        # Ignore differences within a node.
        return
    usual = max(values, key=lambda value: len(values[value]))
    odd = [host for value, each in values.items() if value != usual for host in each]
    yield Finding(
        code,
        severity,
        f"{what}: {', '.join(odd[:5])} {'differ' if len(odd) > 1 else 'differs'}",
        evidence=tuple(
            f"{value or 'none'}: {', '.join(each[:8])}" for value, each in sorted(values.items())
        )[:8],
        fix=fix,
        about=what,
    )
