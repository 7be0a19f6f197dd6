"""Find ranks that finished while other ranks needed them for another step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ddpdoctor.diagnose.crashes.pending_errors import raised_before_a_wait
from ddpdoctor.diagnose.crashes.rank_endings import (
    PATIENCE,
    endings,
    last_phase,
)
from ddpdoctor.diagnose.gradients.constant_losses import constant_losses
from ddpdoctor.diagnose.hangs.hang_snapshot import seen_waiting
from ddpdoctor.diagnose.loops.lone_evaluations import alone_evaluating
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import ErrorRecord, ExitRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase


def leavers(run: Run) -> Iterator[tuple[Rank, list[Rank]]]:
    """Yield each rank that finished while others need it, with the others."""
    ranks = run.last
    if is_explained(run):
        return
    failures = {each.rank: each for each in endings(run, run.restarts[-1])}
    if any(not each.victim and each.kind != "abort-at-exit" for each in failures.values()):
        return
    left = [r for r in ranks if r.ended is not None and r.rank not in failures]
    left += [r for r in ranks if r.rank in failures and not failures[r.rank].victim]
    for leaver in filter(partial(_ended_well, run), left):
        count = armed(leaver)
        wanting = [
            rank
            for rank in ranks
            if _shares(leaver, rank) and _wants_more(rank, count, run, rank.rank in failures)
        ]
        wanting = _without_evaluations(run, wanting)
        if wanting:
            yield leaver, wanting


def is_explained(run: Run) -> bool:
    """Return whether an earlier exception (DDP901) or missing reduction (DDP305) is the cause.

    Relations between the rules cannot express this: findings about the end of a job have these
    codes as well, and follow from standstills.
    """
    return raised_before_a_wait(run) is not None or any(constant_losses(run))


def _without_evaluations(run: Run, wanting: list[Rank]) -> list[Rank]:
    """Drop ranks whose evaluation waits for ranks that never evaluate, which DDP402 reports.

    Relations between the rules cannot express this: perhaps only some ranks are in an evaluation.
    """
    alone = {each for group in alone_evaluating(run) for each in group} if wanting else set()
    return [rank for rank in wanting if rank.rank not in alone]


def _ended_well(run: Run, rank: Rank) -> bool:
    """Return whether the rank reported no failure. Its exit status may still be unknown."""
    if any(call.status for call in rank.records.of(ExitRecord)) or rank.records.of(ErrorRecord):
        return False
    stopped = run.stopped_at
    return stopped is None or rank.ended is None or rank.ended.time < stopped


def armed(rank: Rank) -> int:
    """Return the number of synchronized forwards that the rank has begun."""
    if rank.ended is not None:
        return rank.ended.armed
    return rank.status.armed if rank.status is not None else 0


def _wants_more(rank: Rank, count: int, run: Run, failed: bool) -> bool:
    """Return whether the rank needs a peer that left after ``count``, or did when it failed."""
    status, last = rank.status, last_phase(rank)
    if status is None or last is None:
        return False
    phase, armed = last.label, status.armed
    error = rank.records.first(ErrorRecord)
    if error is not None:
        # The status page was updated until the process ended.
        phase, armed = error.phase, error.armed
    elif not failed and (run.exit_status is not None or run.waits_for(rank) < PATIENCE):
        return False
    if failed and error is not None and phase == Phase.FORWARD.label:
        # A forward needs the peer as well: DDP broadcasts buffers, and once the order of buckets.
        return armed >= count
    behind = phase == Phase.BACKWARD.label or seen_waiting(run, rank.rank)
    return (armed > count and behind) or (armed >= count and phase == Phase.WAIT.label)


def _shares(one: Rank, other: Rank) -> bool:
    """Return whether a DDP module is replicated on both ranks."""
    groups = [record.group_ranks for record in one.records.of(DdpRecord)]
    return one is not other and any({one.rank, other.rank} <= set(group) for group in groups)


def wish(rank: Rank) -> str:
    """Describe the rank's wait: ``waits in backward of step 25 (train.py:28)``."""
    error = rank.records.first(ErrorRecord)
    if error is not None:
        place = f" ({error.location})" if error.location is not None else ""
        return f"failed in {error.collective or error.phase} of step {error.step}{place}"
    status = rank.status
    if status is None:
        return "waits"
    place = f" ({status.site})" if status.site else ""
    return f"waits in {status.collective or status.phase.label} of step {status.step}{place}"
