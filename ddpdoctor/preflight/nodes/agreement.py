"""Whether the options of all nodes agree."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, failure, judged, warning
from ddpdoctor.preflight.command_lines import check_line
from ddpdoctor.preflight.nodes.judging import across_nodes, of_all
from ddpdoctor.preflight.protocol.meet import Meeting


@across_nodes("same-job", "DDP051")
def agreement(meeting: Meeting) -> Outcome:
    """The nodes were started with different options.

    What it finds
        Two nodes with the same node rank, or nodes with different `--nnodes` (errors). Nodes with
        different numbers of ranks (a warning: it works, but is rarely intended).

    Why it is bad
        torchrun takes the second node with a rank for the first one, or waits for a node that never
        comes. No node prints anything.

    How to fix it
        Use the same command on every node and change only `--node-rank`. Under Slurm, use
        `--node-rank $SLURM_NODEID`.

    Example
        Wrong: `--nnodes 2 --node-rank 0` on both machines.
        Right: `--node-rank 0` on the first, `--node-rank 1` on the second.

    When it stays silent
        If the options agree.
    """
    ranks = sum(node.facts.nproc for node in meeting.nodes)
    return judged(f"{of_all(meeting)}, {ranks} ranks", _findings(meeting))


def _findings(meeting: Meeting) -> Iterator[Finding]:
    by_rank: dict[int, list[int]] = {}
    for index, node in enumerate(meeting.nodes):
        if node.facts.rank is not None:
            by_rank.setdefault(node.facts.rank, []).append(index)
    for rank, indices in by_rank.items():
        if len(indices) > 1:
            # Not by who came first: every node says the same, every time.
            indices.sort(key=lambda index: meeting.host(index))
            hosts = [meeting.host(index) for index in indices]
            yield failure(
                f"{len(indices)} nodes have --node-rank {rank}: {', '.join(hosts[:8])}",
                evidence=tuple(
                    f"{meeting.host(index)} is at {meeting.nodes[index].address}"
                    for index in indices[:8]
                ),
                fix="Give every node its own rank, counted from 0.",
                paste=_line(meeting, indices[-1], rank=_free_rank(by_rank)),
                about=f"rank {rank}",
            )
    if by_rank and any(node.facts.rank is None for node in meeting.nodes):
        without = [i for i, node in enumerate(meeting.nodes) if node.facts.rank is None]
        yield failure(
            f"{meeting.hosts(without)} came without --node-rank, the others with one",
            fix="Give --node-rank on every node, or (with --rdzv-backend c10d) on none. On "
            f"{meeting.host(without[0])}:",
            paste=_line(meeting, without[0], rank=_free_rank(by_rank)),
            about="ranks",
        )
    numbers = {node.facts.nnodes for node in meeting.nodes}
    if len(numbers) > 1:
        yield failure(
            f"the nodes do not agree on --nnodes: {', '.join(map(str, sorted(numbers)))}",
            evidence=_each(meeting, [node.facts.nnodes for node in meeting.nodes], "--nnodes"),
            fix="Give --nnodes the same value on every node. For those that are here:",
            paste=_line(
                meeting, meeting.own, nnodes=max(len(meeting.nodes), max(by_rank, default=0) + 1)
            ),
            about="nnodes",
        )
    counts = {node.facts.nproc for node in meeting.nodes}
    if len(counts) > 1:
        listed = [node.facts.nproc for node in meeting.nodes]
        usual = max(listed, key=listed.count)
        odd = next(index for index, count in enumerate(listed) if count != usual)
        yield warning(
            f"the nodes have different numbers of ranks: {', '.join(map(str, sorted(counts)))}",
            evidence=_each(meeting, listed, "--nproc-per-node"),
            fix="Give --nproc-per-node the same value on every node, unless that is intended. On "
            f"{meeting.host(odd)}:",
            paste=_line(meeting, odd, nproc=usual),
            about="nproc",
        )


def _free_rank(taken: Collection[int]) -> int:
    return next(rank for rank in range(len(taken) + 1) if rank not in taken)


def _line(
    meeting: Meeting,
    index: int,
    *,
    nnodes: int | None = None,
    rank: int | None = None,
    nproc: int | None = None,
) -> str:
    """The line that starts the check on a node, with what is to be changed."""
    facts = meeting.nodes[index].facts
    own = replace(meeting.seat, nnodes=facts.nnodes, rank=facts.rank)
    return check_line(own, nproc or facts.nproc, nnodes=nnodes, rank=rank)


def _each(meeting: Meeting, values: list[int], option: str) -> tuple[str, ...]:
    return tuple(
        f"{option} {value}: "
        + meeting.hosts([index for index, other in enumerate(values) if other == value])
        for value in sorted(set(values))[:8]
    )
