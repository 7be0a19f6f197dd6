"""Collectives that the hosts of all ranks have queued: whether their GPUs have come to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpdoctor.analysis.gpu_work import STUCK_GPU, arrival, work
from ddpdoctor.analysis.hang_snapshot import HangSnapshot, RankState
from ddpdoctor.analysis.places import quoted
from ddpdoctor.analysis.waits import Blocked
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.ranks import named
from ddpdoctor.rules.hang_words import about, lasting, without_stacks
from ddpdoctor.rules.out_of_step import waiting_line
from ddpdoctor.rules.rendezvous import CHECK_NETWORK


def by_gpu(still: HangSnapshot, one: Blocked) -> Iterator[Finding]:
    """All ranks are in a collective: whether their GPUs are, too."""
    waiting = one.waiting
    arrivals = {rank.rank: arrival(rank) for rank in waiting}
    late = [rank for rank in waiting if arrivals[rank.rank] == "behind"]
    if late:
        yield from _late_gpus(still, one, late)
        return
    called = waiting[0].waits_at
    alone = len(waiting) == 1
    several = "all ranks that left a dump have" if waiting[0].dump else "all ranks have"
    who = f"{named([waiting[0].rank])} has" if alone else several
    message = f"{who} been in {one.what} for {waiting[0].seconds} s and it does not end: "
    fix = CHECK_NETWORK
    if alone:
        message += "the backend, or the device"
        fix = "See its native frames: `ddpdoctor stacks`."
    elif "unknown" in arrivals.values():
        message += "the network does not carry it, or a GPU has not come to it"
        fix = (
            "Set TORCH_NCCL_ENABLE_TIMING=1: then torch records which GPU has come to a "
            f"collective. {fix}"
        )
    elif "close" in arrivals.values() and waiting[0].under_way is None:
        message += "the network between them, the backend, or the work of that backward on a GPU"
    else:
        message += "the network between them, or the backend"
    yield Finding(
        code="DDP814",
        about="all there",
        severity=lasting(Severity.WARNING, waiting),
        message=message,
        ranks=tuple(rank.rank for rank in waiting),
        location=called,
        evidence=(*(waiting_line(rank) for rank in waiting[:4]), *without_stacks(still)),
        fix=fix,
    )


def _late_gpus(still: HangSnapshot, one: Blocked, late: Sequence[RankState]) -> Iterator[Finding]:
    """GPUs that are still at work which was queued before the collective."""
    ranks = [rank.rank for rank in late]
    others = [rank for rank in one.waiting if rank not in late]
    waits = f"{named([rank.rank for rank in others])} wait{'s' if len(others) == 1 else ''}"
    text, place = work(late[0])
    called = late[0].waits_at
    severity = lasting(Severity.WARNING, one.waiting)
    yield Finding(
        code="DDP802",
        about=about(late, severity),
        severity=severity,
        message=f"the GPU{'s' if len(late) > 1 else ''} of {named(ranks)} never came to {one.what} "
        f"of {quoted(called)}{f', where {waits}' if others else ''}: still at work that was "
        f"queued before it, for {late[0].seconds} s: {text}",
        ranks=tuple(ranks),
        location=place or called,
        evidence=(*(waiting_line(rank) for rank in others[:3]), *without_stacks(still)),
        fix=STUCK_GPU,
        traceback=late[0].traceback,
        moment=still.record.time,
    )
