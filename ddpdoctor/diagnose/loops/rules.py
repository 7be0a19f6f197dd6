"""Rules for decisions that a rank makes alone (DDP403) and for uneven inputs (DDP109)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.core import relations
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import count as counted
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import (
    ABORT,
    MISPAIRED,
    STANDSTILL,
    Lapsed,
    always,
    brings_about,
    fact,
    same_subject,
)
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose import STANDSTILLS
from ddpdoctor.diagnose.crashes.rank_endings import PATIENCE, last_phase
from ddpdoctor.diagnose.data.draws import UNFOLLOWED, Pass, Passes, matched
from ddpdoctor.diagnose.hangs.hang_snapshot import seen_waiting
from ddpdoctor.diagnose.loops.training_loops import (
    LeftByHand,
    LocalDecision,
    Trace,
    left_by_hand,
    local_decisions,
    loops_ended_early,
    traces_of,
)
from ddpdoctor.diagnose.replicas.differences import Replica, replicas
from ddpdoctor.diagnose.source_files import quoted, source_of
from ddpdoctor.diagnose.source_operations import without_join
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase

_REDUCE = (
    "Reduce the value over the ranks before the comparison (dist.all_reduce, with MAX for a flag), "
    "so that every rank takes the same branch in the same step."
)


def _lapses(finding: Finding, run: Run) -> Lapsed | None:
    """Keep a finding about a skipped step, because the evidence is only in the newest steps."""
    return fact(finding, run) if STANDSTILL in finding.subjects else None


@rule(
    "DDP403",
    "rank-local-decision",
    Severity.ERROR,
    supersedes={
        "DDP701": always,
        "DDP801": same_subject,
        "DDP803": relations.afterwards,
        **dict.fromkeys(STANDSTILLS, brings_about),
    },
    lapses=_lapses,
)
def rank_local_decision(run: Run) -> Iterator[Finding]:
    """One rank alone skipped a step or left the training loop.

    What it finds
        A batch without a backward on some ranks of a DDP group, a training loop that some ranks
        left before its loader's end, or epochs that some ranks did not start, while the other ranks
        continued. Also an `optimizer.step()` that some ranks skipped. The finding names the
        statement: `break`, `return`, `continue` or `if`.

    Why it is bad
        Every backward is a collective. The rank's next backward pairs with a different step of the
        others, and at the end the job hangs or fails with "Connection closed by peer", far from the
        cause. A skipped optimizer step makes the rank's parameters different, and nothing fails.

    How to fix it
        Decide on all ranks together: reduce the value over the ranks before you compare it.

    Example
        Wrong:
            if loss.isnan():
                continue
        Right:
            bad = loss.isnan().float()
            dist.all_reduce(bad)  # the same value on every rank
            if bad > 0:
                continue

    When it stays silent
        If all ranks leave after the same step or skip the same batch, inside `join()`, for a loader
        that simply ended (DDP109), for loops that call `next()`, for a rank that failed or was
        stopped, and where a loop that counts its steps makes up for a skipped batch.
    """
    made = local_decisions(run)
    yield from map(_decision_finding, made)
    if not made:
        for replica in replicas(run):
            found = _first_skipped_step(replica)
            if found is not None and _diverged(replica, found):
                yield _skipped_step_finding(found)
        yield from (_by_hand_finding(each) for each in left_by_hand(run) if each.kind != "ended")


def _decision_finding(decision: LocalDecision) -> Finding:
    who, others = named(decision.ranks), named(each.rank.rank for each in decision.others)
    loop, at = decision.place.location, decision.location
    if decision.kind == "skipped":
        what = f"skipped batch {decision.batch} of the training loop (step {decision.step})"
        went = f"{others} trained on it"
    elif decision.kind == "left":
        after = "" if decision.batch is None else f", after {_batches(decision.batch)}"
        what = f"left the training loop in step {decision.step}{after}"
        went = f"{others} went on"
    else:
        what = f"began no further epoch after {decision.step} steps"
        went = f"{others} did"
    evidence = [_did(each) for each in (*decision.traces, *decision.others)[:6]]
    if loop != at:
        where = f"line {loop.line}" if loop.path == at.path else str(loop)
        evidence.append(f"the training loop is at {where}")
    return Finding(
        code="DDP403",
        about=f"{decision.kind} {at}",
        subjects=frozenset((MISPAIRED, STANDSTILL)),
        severity=Severity.ERROR,
        message=f"{who} alone {what} while {went}: the deciding value was not reduced",
        ranks=decision.ranks,
        location=at,
        evidence=tuple(evidence),
        fix=_REDUCE,
    )


def _by_hand_finding(found: LeftByHand) -> Finding:
    who, others = named(found.steps), named(found.others)
    what = "left the training loop" if found.kind == "left" else "skipped a step of the loop"
    return Finding(
        code="DDP403",
        moment=found.moment,
        about=f"{found.kind} {found.location}",
        subjects=frozenset((MISPAIRED, STANDSTILL)),
        severity=Severity.ERROR,
        message=f"{who} alone {what} while {others} went on: the deciding value was not reduced",
        ranks=tuple(found.steps),
        location=found.location,
        evidence=_began(found),
        fix=_REDUCE,
    )


def _began(found: LeftByHand) -> tuple[str, ...]:
    """Describe how many backwards the ranks began that left a loop or wait in it."""
    return (
        *(f"rank {n} is past the loop after {each} steps" for n, each in found.steps.items()),
        *(f"rank {n} is in the backward of step {each}" for n, each in found.others.items()),
        f"the training loop is at {found.loop}",
    )[:8]


def _did(trace: Trace) -> str:
    """Describe what a rank did in a loop."""
    reached = trace.reached
    steps = "" if reached is None else f" and began {reached} reduced backwards in it"
    if trace.fetched is None:
        took = "is still in the loop"
    elif trace.recorded_end or trace.state != "left":
        took = f"took {_batches(trace.fetched)}"
    else:
        took = "left the loop"
    return f"rank {trace.rank.rank} {took}{steps}"


def _batches(count: int) -> str:
    return counted(count, "batch", "batches")


@dataclass(frozen=True)
class _SkippedStep:
    """An optimizer step that some ranks skipped."""

    step: int  # The step with more backwards on these ranks
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    backwards: dict[int, int]  # Number of backwards in that step, by rank
    member: Rank  # One of the ranks


def _first_skipped_step(replica: Replica) -> _SkippedStep | None:
    """Return the first step with more backwards on some ranks than on others."""
    counts = {
        rank.rank: {each.step: each.backwards for each in rank.steps} for rank in replica.ranks
    }
    common = set.intersection(*(set(each) for each in counts.values()))
    for step in sorted(common):
        backwards = {rank: each[step] for rank, each in counts.items()}
        least = min(backwards.values())
        if not least:
            # A step without a backward is another fault.
            return None
        guilty = tuple(sorted(rank for rank, count in backwards.items() if count > least))
        if guilty:
            others = tuple(sorted(set(backwards) - set(guilty)))
            member = next(each for each in replica.ranks if each.rank in guilty)
            return _SkippedStep(step, guilty, others, backwards, member)
    return None


def _diverged(replica: Replica, found: _SkippedStep) -> bool:
    """Return whether the ranks' reduced backwards or parameters have differed since then.

    Backwards through a rank's other model change neither.
    """
    prints = replica.prints
    common = sorted(set.intersection(*map(set, prints.values())))
    later = [step for step in common if step >= found.step]
    one, other = prints[found.ranks[0]], prints[found.others[0]]
    ahead = [step for step in later if one[step].armed > other[step].armed]
    if ahead and ahead[0] == later[0]:
        return len(ahead) > 1 or replica.over
    difference = replica.difference("parameters")
    return difference is not None and difference.within(found.step)


def _skipped_step_finding(found: _SkippedStep) -> Finding:
    who, others = named(found.ranks), named(found.others)
    return Finding(
        code="DDP403",
        about=f"left out {found.step}",
        severity=Severity.ERROR,
        message=f"{who} alone did not step the optimizer after a backward of step {found.step}, "
        f"and {others} did: the deciding value was not reduced, and the parameters differ",
        ranks=found.ranks,
        location=_step_condition(found.member) or found.member.site("optimizer"),
        evidence=tuple(
            f"rank {rank} had {counted(count, 'backward')} in step {found.step}"
            for rank, count in sorted(found.backwards.items())[:6]
        ),
        fix=f"Reduce the value over the ranks before the comparison, so that {who} "
        f"step{'' if len(found.ranks) > 1 else 's'} whenever {others} "
        f"do{'' if len(found.others) > 1 else 'es'}; torch.amp.GradScaler does so by itself.",
    )


def _step_condition(rank: Rank) -> Location | None:
    """Return the statement between backward and optimizer step that decides whether to step."""
    at, backward = rank.site("optimizer"), rank.site("backward")
    source = source_of(at.path) if at is not None else None
    loops = source.around(at.line) if at is not None and source is not None else []
    if at is None or source is None or not loops:
        return None
    conditions = source.conditions(at.line, loops[0])
    if conditions:
        return Location(at.path, conditions[0].lineno)
    after = backward.line if backward is not None and backward.path == at.path else 0
    skips = [each for each in source.skips(loops[0]) if after < each.lineno < at.line]
    return Location(at.path, skips[0].lineno) if len(skips) == 1 else None


@rule(
    "DDP109",
    "uneven-inputs",
    Severity.ERROR,
    supersedes={
        "DDP801": relations.same_ranks_afterwards,
        "DDP802": relations.same_ranks_afterwards,
        "DDP803": relations.afterwards,
        "DDP814": relations.brings_about,
        "DDP815": relations.same_ranks_afterwards,
    },
)
def uneven(run: Run) -> Iterator[Finding]:
    """The ranks have different numbers of batches: a rank with fewer will stop before the others.

    What it finds
        A training loop over a loader that has more batches on one rank of a DDP group than on
        another. This is known from the loaders' lengths during the first epoch if the source of the
        loop shows that it takes every batch; otherwise once the rank with more batches waits alone.
        Without a loader: a `for` without another way out that some ranks have left.

    Why it is bad
        Every backward is a collective. The rank that ran out of batches continues with something
        else, and the others wait for it until the timeout, or their calls pair with its next ones.

    How to fix it
        Give every rank the same number of batches (`DistributedSampler` pads, `drop_last=True`
        cuts), or run the loop inside `with model.join():` if it calls no other collectives.

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
        data sets, whose length is not known, until a rank waits or failed alone. DDP801 and DDP803,
        which follow from it, are not reported then.
    """
    known = _known_lengths(run)
    yield from known
    if known or local_decisions(run):
        return
    early = [_ended_finding(run, each) for each in loops_ended_early(run)]
    yield from early or (
        _fewer_finding(run, each) for each in left_by_hand(run) if each.kind == "ended"
    )


def _known_lengths(run: Run) -> list[Finding]:
    """Return a finding about loaders whose lengths are known to differ, if any."""
    for passes in matched(run):
        counts = _uneven_counts(run, passes)
        if not counts:
            continue
        few, many = min(counts.values()), max(counts.values())
        short = sorted(rank for rank, count in counts.items() if count < many)
        first = passes[short[0]]
        ends = [_ran_out(run, passes[rank]) for rank in short]
        found = Finding(
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
            fix=without_join(
                run,
                first.read,
                "Give all ranks the same number of batches (a DistributedSampler, or drop_last and "
                "equal shards), or wrap the loop in `with model.join():`.",
            ),
        )
        return [found]
    return []


def _uneven_counts(run: Run, passes: Passes) -> dict[int, int]:
    """Return each rank's number of batches if they will leave a rank alone. Otherwise empty."""
    each = list(passes.values())
    counts = {one.rank: one.record.batches for one in each if one.record.batches is not None}
    uneven = len(counts) == len(each) and len(set(counts.values())) > 1
    if not uneven or not all(one.trains and not one.record.joins for one in each):
        return {}
    to_end = all(one.record.to_end for one in each)
    return counts if to_end or _left_alone(run, passes) else {}


def _fewer_finding(run: Run, found: LeftByHand) -> Finding:
    who, others = named(found.steps), named(found.others)
    return Finding(
        code="DDP109",
        moment=found.moment,
        about=str(found.loop),
        severity=Severity.ERROR,
        message=f"{who} had fewer iterations of the training loop than {others}, "
        f"which wait{'' if len(found.others) > 1 else 's'} in a step without them",
        ranks=tuple(found.steps),
        location=found.loop,
        evidence=_began(found),
        fix=without_join(
            run,
            found.loop,
            "Give all ranks the same number of iterations: cut them to the smallest "
            "(dist.all_reduce with MIN), or wrap the loop in `with model.join():`.",
        ),
    )


def _ended_finding(run: Run, early: LocalDecision) -> Finding:
    """Make the finding about a loop whose loader ended earlier on some ranks."""
    ranks, others = early.ranks, [each.rank.rank for each in early.others]
    return Finding(
        code="DDP109",
        about=str(early.location),
        moment=min(each.time for each in early.traces),
        subjects=frozenset((MISPAIRED, STANDSTILL, ABORT)),
        severity=Severity.ERROR,
        message=f"{named(ranks)} ran out of batches before the others: the loop at "
        f"{quoted(early.location)} ended after {_batches(early.batch or 0)} (step {early.step}), "
        f"and {named(others)} went on",
        ranks=ranks,
        location=early.location,
        evidence=tuple(_did(each) for each in (*early.traces, *early.others)[:6]),
        fix=without_join(
            run,
            early.location,
            "Give all ranks the same number of batches: as many shards or samples for each, a "
            "stream that repeats with a fixed length, or wrap the loop in `with model.join():`.",
        ),
    )


def _ran_out(run: Run, one: Pass) -> int:
    """Return when a rank received the last batch of a pass, in Unix nanoseconds. 0 if unknown."""
    if one.closed:
        return one.record.closed if one.record.state == "ended" else 0
    loop = _loop(run, one)
    return loop.time if loop is not None and loop.last.state == "ended" else 0


def _loop(run: Run, one: Pass) -> Trace | None:
    """Return the loop that read a pass. Its end is recorded at once, whatever the budget."""
    return next(
        (
            each
            for each in traces_of(run.rank(one.rank), run)
            if each.frames[0] == one.read and each.before == one.record.armed
        ),
        None,
    )


def _goes_on(run: Run, one: Pass) -> bool:
    """Return whether a rank is still reading a pass, or was when its process ended."""
    if one.closed:
        return False
    loop, status = _loop(run, one), run.rank(one.rank).status
    if loop is not None:
        return not loop.recorded_end
    # Without the loop's record, its end may be in a rotated part of the journal.
    made = status.armed - one.record.armed if status is not None else 0
    return one.record.state != UNFOLLOWED and made <= (one.record.batches or 0)


def _left_alone(run: Run, passes: Passes) -> bool:
    """Return whether a rank with more batches failed or hangs in a step without the others."""
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
    """Return whether a rank waits or failed in a step after the last one of the others."""
    rank = run.rank(one.rank)
    if rank.status is None:
        return False
    error = rank.records.first(ErrorRecord)
    armed = error.armed if error is not None else rank.status.armed
    if not _goes_on(run, one) and (error is None or armed != one.record.armed_after):
        return False
    if error is None and rank.ended is not None:
        return False
    # Native code or a signal may have ended the rank without another record.
    died = rank.exit is not None and rank.ended is None
    waits = error is not None or died or run.waits_for(rank) > PATIENCE
    within = last_phase(rank) in (Phase.BACKWARD, Phase.ENDED)
    return waits and armed > over and (within or seen_waiting(run, rank.rank))
