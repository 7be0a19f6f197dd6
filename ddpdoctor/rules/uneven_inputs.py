"""Data (DDP109): ranks that have different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.analysis.draws import UNFOLLOWED, Pass, Passes, matched
from ddpdoctor.analysis.endings import PATIENCE, last_phase
from ddpdoctor.analysis.hang_snapshot import seen_waiting
from ddpdoctor.analysis.training_loops import Trace, traces_of
from ddpdoctor.core import relations
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import Phase


@rule(
    "DDP109",
    "uneven-inputs",
    Severity.ERROR,
    supersedes={
        "DDP801": relations.same_ranks_afterwards,
        "DDP802": relations.same_ranks_afterwards,
        "DDP803": relations.afterwards,
        "DDP815": relations.same_ranks_afterwards,
    },
)
def uneven(run: Run) -> Iterator[Finding]:
    """The ranks have different numbers of batches: the rank with fewer will stop before the others.

    What it finds
        A training loop over a loader that has more batches on one rank of a DDP group than on
        another. This is known from the loaders' lengths during the first epoch if the source of the
        loop shows that it takes every batch; otherwise once the rank with more batches waits alone.

    Why it is bad
        Every backward is a collective. The rank that ran out of batches continues with something
        else, and the others wait for it until their timeout, or pair with its next step.

    How to fix it
        Give every rank the same number of batches (`DistributedSampler` pads, `drop_last=True`
        cuts), or run the loop inside `with model.join():`.

    Example
        Wrong:
            for batch in DataLoader(my_files(rank)):  # 100 files on rank 0, 97 on rank 1
                train(batch)
        Right:
            with model.join():
                for batch in DataLoader(my_files(rank)):
                    train(batch)

    When it stays silent
        Inside `join()`. For loops that may stop before the loader ends (`break`, `islice`, `zip`, a
        generator), unless they really leave a rank alone. For evaluation loaders, and for iterable
        data sets, whose length is not known. DDP801 and DDP803, which follow from it, are not
        reported as well.
    """
    for passes in matched(run):
        each = list(passes.values())
        counts = {one.rank: one.record.batches for one in each if one.record.batches is not None}
        if len(counts) < len(each) or not _is_uneven(run, passes):
            continue
        few, many = min(counts.values()), max(counts.values())
        short = sorted(rank for rank, count in counts.items() if count < many)
        first = passes[short[0]]
        ends = [_ran_out(run, passes[rank]) for rank in short]
        yield Finding(
            code="DDP109",
            moment=min((end for end in ends if end), default=0),
            about=str(first.made),
            severity=Severity.ERROR,
            message=f"{named(short)} will run out of batches before the others: the loader built "
            f"at {first.made} has {few} batches on {named([r for r in short if counts[r] == few])}"
            f" and {many} elsewhere",
            ranks=tuple(short),
            location=first.made,
            evidence=(
                *(
                    f"rank {rank}: {counts[rank]} batches of {passes[rank].length} samples"
                    for rank in sorted(counts)[:8]
                ),
                f"read at {first.read}",
            ),
            fix="Give all ranks the same number of batches (a DistributedSampler, or drop_last and "
            "equal shards), or wrap the loop in `with model.join():`.",
        )
        return


def _is_uneven(run: Run, passes: Passes) -> bool:
    """Whether ranks train on different numbers of batches, and that will do harm, or did."""
    each = list(passes.values())
    if not all(one.trains for one in each) or any(one.record.joins for one in each):
        return False
    if len({one.record.batches for one in each}) == 1:
        return False
    return all(one.record.to_end for one in each) or _left_alone(run, passes)


def _ran_out(run: Run, one: Pass) -> int:
    """When a rank had had all batches of a pass, in Unix nanoseconds; 0 if that is not known."""
    if one.closed:
        return one.record.closed if one.record.state == "ended" else 0
    loop = _loop(run, one)
    return loop.time if loop is not None and loop.last.state == "ended" else 0


def _loop(run: Run, one: Pass) -> Trace | None:
    """The loop that read a pass: its end is recorded at once, and whatever the budget."""
    return next(
        (
            each
            for each in traces_of(run.rank(one.rank), run)
            if each.frames[0] == one.read and each.before == one.record.armed
        ),
        None,
    )


def _goes_on(run: Run, one: Pass) -> bool:
    """Whether a rank is still in a pass, or was when its process ended."""
    if one.closed:
        return False
    loop, status = _loop(run, one), run.rank(one.rank).status
    if loop is not None:
        return not loop.recorded_end
    # Without its loop, what a rotated journal no longer holds may have ended it.
    made = status.armed - one.record.armed if status is not None else 0
    return one.record.state != UNFOLLOWED and made <= (one.record.batches or 0)


def _left_alone(run: Run, passes: Passes) -> bool:
    """Whether a rank with more batches failed in, or hangs in, a step that one with fewer left."""
    if any(run.rank(rank).lost for rank in passes):
        return False
    few = min(one.record.batches or 0 for one in passes.values())
    short = [one for one in passes.values() if one.record.batches == few]
    over = [
        (one.record.armed_after or 0) if one.closed else one.record.armed + few
        for one in short
        if _ran_out(run, one)
    ]
    return bool(over) and any(
        _is_alone(run, one, max(over)) for one in passes.values() if one not in short
    )


def _is_alone(run: Run, one: Pass, over: int) -> bool:
    """Whether a rank waits for, or failed in, a step behind the last of the others."""
    rank = run.rank(one.rank)
    if rank.status is None:
        return False
    error = rank.records.first(ErrorRecord)
    armed = error.armed if error is not None else rank.status.armed
    if not _goes_on(run, one) and (error is None or armed != one.record.armed_after):
        return False
    if error is None and rank.ended is not None:
        return False
    # Native code, or a signal, may have ended it without another record.
    died = rank.exit is not None and rank.ended is None
    waits = error is not None or died or run.waits_for(rank) > PATIENCE
    within = last_phase(rank) in (Phase.BACKWARD, Phase.ENDED)
    return waits and armed > over and (within or seen_waiting(run, rank.rank))
