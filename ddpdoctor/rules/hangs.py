"""Hangs (DDP8xx): ranks that wait for one that does not come."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from ddpdoctor.analysis.endings import PATIENCE, endings, last_phase
from ddpdoctor.analysis.hang_snapshot import seen_waiting
from ddpdoctor.core.finding import Finding, Location, Severity, rule
from ddpdoctor.core.relations import STANDSTILL, STANDSTILLS, brings_about
from ddpdoctor.rules.evaluation import alone_evaluating
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import ErrorRecord, ExitRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase


@rule(
    "DDP801",
    "left-early",
    Severity.ERROR,
    supersedes=dict.fromkeys(STANDSTILLS, brings_about),
)
def left_early(run: Run) -> Iterator[Finding]:
    """A rank finished while the other ranks started another step.

    What it finds
        A rank whose script ended normally after fewer synchronized steps than another rank of its
        group has started. The other rank waits in a collective or failed there.

    Why it is bad
        The remaining ranks hang until their timeout, or fail with "Connection closed by peer". The
        launcher blames them: the rank that left has exit status 0.

    How to fix it
        Give every rank the same number of batches (`DistributedSampler` pads; `drop_last=True`
        cuts), or run the loop inside `with model.join():`. Decide to stop on all ranks together.

    Example
        Wrong:
            for batch in my_shard(rank):  # 100 batches on rank 0, 97 on rank 1
                train(batch)
        Right:
            for batch in islice(my_shard(rank), 97):
                train(batch)

    When it stays silent
        Inside `join()`, for ranks of different DDP groups, for extra forwards in an evaluation, if
        a rank failed (DDP9xx), and if the cause is known: the statement by which a rank alone left
        or skipped a step (DDP403), or loaders of different length (DDP109).
    """
    for leaver, wanting in leavers(run):
        yield _finding(leaver, wanting)


def leavers(run: Run) -> Iterator[tuple[Rank, list[Rank]]]:
    """Ranks that left, each with those that wanted another step of it."""
    restart = run.restarts[-1]
    ranks = run.attempt(restart)
    failures = {each.rank: each for each in endings(run, restart)}
    if any(not each.victim and each.kind != "abort-at-exit" for each in failures.values()):
        return
    at_exit = {rank for rank, each in failures.items() if each.kind == "abort-at-exit"}
    left = [r for r in ranks if r.ended is not None and r.rank not in failures]
    left += [r for r in ranks if r.rank in at_exit]
    for leaver in left:
        wanting = _wanting(leaver, ranks, run, failures) if _ended_well(leaver, run) else []
        if wanting:
            yield leaver, wanting


def _wanting(
    leaver: Rank, ranks: Sequence[Rank], run: Run, failed: Container[int | None]
) -> list[Rank]:
    """The ranks that wanted another step of one that left, beyond its part of an evaluation."""
    count = _armed(leaver)
    wanting = [
        rank
        for rank in ranks
        if _shares(leaver, rank) and _wants_more(rank, count, run, rank.rank in failed)
    ]
    if wanting:
        # Their last evaluation waits for ranks that never evaluate: DDP402 says so. No relation
        # of rules, since the others of them may want another step.
        alone = {each for present in alone_evaluating(run) for each in present}
        wanting = [rank for rank in wanting if rank.rank not in alone]
    return wanting


def _finding(leaver: Rank, wanting: list[Rank]) -> Finding:
    count = _armed(leaver)
    names = ", ".join(str(rank.rank) for rank in wanting)
    many = len(wanting) > 1
    call = _leaving_call(leaver)
    evidence = [
        f"rank {leaver.rank} ended regularly after {_steps(count)}",
        *(f"rank {rank.rank} {_wish(rank)}" for rank in wanting[:4]),
    ]
    if call is not None and call.location is not None:
        evidence.append(f"rank {leaver.rank} called {call.how} at {call.location}")
    return Finding(
        code="DDP801",
        severity=Severity.ERROR,
        message=f"rank {leaver.rank} left after {_steps(count)} while "
        f"rank{'s' if many else ''} {names} wanted another",
        ranks=(leaver.rank,),
        location=_leaving(leaver),
        subjects=frozenset((STANDSTILL,)),
        moment=leaver.ended.time if leaver.ended is not None else 0,
        evidence=tuple(evidence),
        fix="Give all ranks the same number of steps (equal shards, drop_last), or wrap the "
        "loop in `with model.join():`.",
    )


def _ended_well(rank: Rank, run: Run) -> bool:
    """Whether nothing that the rank reported says otherwise; its exit status is not known yet."""
    if any(call.status for call in rank.records.of(ExitRecord)) or rank.records.of(ErrorRecord):
        return False
    stopped = run.stopped_at
    return stopped is None or rank.ended is None or rank.ended.time < stopped


def _armed(rank: Rank) -> int:
    """Synchronized forwards begun so far."""
    if rank.ended is not None:
        return rank.ended.armed
    return rank.status.armed if rank.status is not None else 0


def _wants_more(rank: Rank, count: int, run: Run, failed: bool) -> bool:
    """Whether the rank needs, or needed when it failed, a peer that left after ``count`` steps."""
    status, last = rank.status, last_phase(rank)
    if status is None or last is None:
        return False
    phase, armed = last.label, status.armed
    error = rank.records.first(ErrorRecord)
    if error is not None:
        # By the time the process was gone the status page had moved on.
        phase, armed = error.phase, error.armed
    elif not failed and (run.exit_status is not None or run.waits_for(rank) < PATIENCE):
        return False
    if failed and error is not None and phase == Phase.FORWARD.label:
        # In it DDP broadcasts buffers, and once the order of its buckets.
        return armed >= count
    behind = phase == Phase.BACKWARD.label or seen_waiting(run, rank.rank)
    return (armed > count and behind) or (armed >= count and phase == Phase.WAIT.label)


def _shares(one: Rank, other: Rank) -> bool:
    """Whether some DDP module is replicated on both ranks."""
    groups = [record.group_ranks for record in one.records.of(DdpRecord)]
    return one is not other and any({one.rank, other.rank} <= set(group) for group in groups)


def _wish(rank: Rank) -> str:
    """What the rank wanted of the one that left: ``waits in backward of step 25 (train.py:28)``."""
    error = rank.records.first(ErrorRecord)
    if error is not None:
        place = f" ({error.location})" if error.location is not None else ""
        return f"failed in {error.collective or error.phase} of step {error.step}{place}"
    status = rank.status
    if status is None:
        return "waits"
    place = f" ({status.site})" if status.site else ""
    return f"waits in {status.collective or status.phase.label} of step {status.step}{place}"


def _steps(count: int) -> str:
    return f"{count} synchronized step{'' if count == 1 else 's'}"


def _leaving_call(rank: Rank) -> ExitRecord | None:
    """The ``sys.exit(0)`` by which the rank left, if it did so."""
    return next((call for call in rank.records.of(ExitRecord) if call.status == 0), None)


def _leaving(rank: Rank) -> Location | None:
    """The loop that came to its end: where its batches are drawn, else its forward."""
    call = _leaving_call(rank)
    if call is not None and call.location is not None:
        return call.location
    return rank.site("data") or rank.site("forward")
