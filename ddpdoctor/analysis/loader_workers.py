"""What the worker processes of a DataLoader do while a rank waits for their batch."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.analysis.hang_snapshot import RankState
from ddpdoctor.analysis.process_activity import children_compute, computing, is_seen, stirs
from ddpdoctor.core.finding import Severity
from ddpdoctor.system.process_state import ChildState


def workers_of(rank: RankState) -> list[ChildState]:
    """The child processes of a rank that may be its loader's workers."""
    children = rank.stacks.state.children if rank.stacks is not None else ()
    return [child for child in children if "resource_tracker" not in child.command]


def workers_activity(rank: RankState, children: Sequence[ChildState]) -> tuple[str, Severity, str]:
    """What the workers of a DataLoader do, how bad that is, and what to do about it."""
    dead = [child for child in children if child.letter in ("Z", "X")]
    stopped = [child for child in children if child.letter in ("T", "t")]
    number, one = len(children), len(children) == 1
    if dead:
        what = "which died" if one else f"{_count(len(dead))} of which died"
        return what, Severity.ERROR, "See the worker's own output for why."
    if stopped:
        who = "which" if one else f"{_count(len(stopped))} of which"
        what = f"{who} {_be(len(stopped))} stopped (SIGSTOP)"
        return what, Severity.ERROR, f"Continue it: `kill -CONT {stopped[0].pid}`."
    if not number:
        return "which are gone", Severity.ERROR, "See the workers' own output for why."
    if is_seen(rank, "children_network"):
        what = f"{'which waits' if one else 'one of which waits'} for the network"
        fix = "Look at the storage that the data come from, and give each request a timeout."
        return what, Severity.WARNING, fix
    if children_compute(rank):
        what = f"which {_be(number)} {computing(rank.activity('children_cpu'))}"
        return what, Severity.WARNING, "Make loading faster, or use more workers."
    if stirs(rank):
        what = f"which work{'s' if one else ''} now and then"
        return what, Severity.WARNING, "Make loading faster, or use more workers."
    return (
        f"which sleep{'s' if one else ''}, too: deadlocked",
        Severity.ERROR,
        "A worker waits for a lock, a queue or a file: a lock that was held when it was forked "
        "(threads, a library with a pool) never opens. Try `multiprocessing_context='spawn'` "
        "or num_workers=0.",
    )


def _count(number: int) -> str:
    return "one" if number == 1 else str(number)


def _be(number: int) -> str:
    return "is" if number == 1 else "are"
