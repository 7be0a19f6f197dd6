"""What findings about a job that makes no progress have in common, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.analysis.hang_snapshot import HangSnapshot, RankState
from ddpdoctor.analysis.steadiness import lasts
from ddpdoctor.core.finding import Severity
from ddpdoctor.core.opening import integer

NATIVE = 4
"""Native frames that are shown."""


def lasting(severity: Severity, ranks: Sequence[RankState]) -> Severity:
    """How bad it is what some ranks do: a warning that lasts is an error."""
    if severity is Severity.WARNING and ranks and all(map(lasts, ranks)):
        return Severity.ERROR
    return severity


def about(ranks: Sequence[RankState], severity: Severity) -> str:
    """One standstill of the same ranks, wherever they are seen meanwhile."""
    since = max(integer(rank.record, "since") for rank in ranks)
    return f"{severity.label} {[rank.rank for rank in ranks]} {since}"


def without_stacks(still: HangSnapshot) -> tuple[str, ...]:
    """Ranks whose evidence could not be had."""
    found = [
        f"no stack of rank {rank.rank}: {rank.stacks.trouble}"
        + (f"; {rank.stacks.note}" if rank.stacks.note else "")
        for rank in still.ranks
        if rank.stacks is not None and rank.stacks.trouble and rank.dead_for is None
    ]
    return tuple(found[:3])


def native_frames(rank: RankState) -> tuple[str, ...]:
    """What a rank does below Python, the innermost frames."""
    frames = rank.stacks.native[-NATIVE:] if rank.stacks is not None else ()
    return (f"native frames of rank {rank.rank}: {' > '.join(frames)}",) if frames else ()
