"""A run in a few lines: what ran, how fast, how it ended, what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddpdoctor.core import units
from ddpdoctor.core.finding import Finding
from ddpdoctor.run.records.process import OverrideRecord
from ddpdoctor.run.records.supervisor import UnwatchedRecord
from ddpdoctor.run.status import PHASES

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run


def lines(run: Run) -> Iterator[str]:
    """What ran, how it ended, how fast it was, and what could not be read; of every attempt."""
    yield from _attempts(run)
    again = f"attempt {run.restarts[-1] + 1}: " if len(run.restarts) > 1 else ""
    yield f"{again}{_size(run)}{_ending(run)}"
    pace = _pace(run)
    if pace:
        yield pace
    overridden = sorted(
        {
            f"{record.name}={record.value}"
            for rank in run.last
            for record in rank.records.of(OverrideRecord)
        }
    )
    if overridden:
        yield f"overridden for `ddpdoctor scale`: {', '.join(overridden)}"
    cost = _cost(run)
    if cost:
        yield cost
    lost = sum(rank.status.dropped for rank in run.last if rank.status is not None)
    if lost:
        yield f"{lost} records could not be written and are missing"
    for line in run.unreadable[:3]:
        yield f"not read: {line}"


def _attempts(run: Run) -> Iterator[str]:
    """The attempts that the launcher repeated: how far each came, and what ended it."""
    for restart in run.restarts[:-1]:
        from ddpdoctor.analysis.endings import endings

        ended = next((each for each in endings(run, restart) if not each.victim), None)
        why = "" if ended is None else f"; {ended.name}: {ended.text}"
        ranks = run.attempt(restart)
        steps = max((rank.status.step for rank in ranks if rank.status is not None), default=0)
        text = f"{units.count(len(ranks), 'rank')}, {units.count(steps, 'step')}"
        yield f"attempt {restart + 1}: {text}{why}"


def count(current: Sequence[Finding], ignored: int = 0) -> str:
    """How many findings there are: ``findings: 1 error, 2 warnings``, and how many are ignored."""
    counts = Counter(finding.severity.label for finding in current)
    said = ", ".join(
        f"{counts[label]} info" if label == "info" else units.count(counts[label], label)
        for label in ("error", "warning", "info")
        if counts[label]
    )
    return f"findings: {said or 'none'}{f' ({ignored} ignored)' if ignored else ''}"


def _size(run: Run) -> str:
    ranks = run.last
    if not ranks:
        unwatched = run.supervisor.first(UnwatchedRecord)
        why = unwatched.why if unwatched is not None else ""
        return f"no rank was watched: {why}" if why else "no rank joined a process group"
    seen = {rank.rank for rank in ranks}
    world = max((rank.status.world_size for rank in ranks if rank.status is not None), default=0)
    of = f" of {world}" if world > len(seen) else ""
    text = f"{len(seen)}{of} rank{'' if len(seen) == 1 and not of else 's'}"
    steps = max((rank.status.step for rank in ranks if rank.status is not None), default=0)
    return f"{text}, {units.count(steps, 'step')}"


def _pace(run: Run) -> str:
    """The median step, and what all steps are spent on; empty without steps."""
    from statistics import median

    from ddpdoctor.analysis.pace import WARM_UP
    from ddpdoctor.run.waits import split_steps

    timed = [step for steps in split_steps(run).values() for step in steps if step.total > 0]
    timed = [step for step in timed if step.split] or timed
    timed = [step for step in timed if step.step >= WARM_UP] or timed
    if not timed:
        return ""
    text = f"median step {units.time(median(step.total for step in timed) / 1e9)}"
    total = sum(step.total for step in timed)
    shares = []
    for name in (*PHASES, "wait"):
        share = sum(getattr(step, name) for step in timed) / total
        if share >= 0.01:
            shares.append(f"{name} {100 * share:.0f} %")
    return f"{text}: {', '.join(shares)}" if shares else text


def _cost(run: Run) -> str:
    """What ddpdoctor took of the ranks' time, as they measured it; empty before their end."""
    ends = [rank.ended for rank in run.last if rank.ended is not None]
    over = sum(end.over for end in ends)
    if over <= 0:
        return ""
    spent, followed = (sum(getattr(end, name) for end in ends) for name in ("spent", "followed"))
    return (
        f"ddpdoctor took {100 * (spent + followed) / over:.2f} % of the ranks' time: "
        f"{100 * followed / over:.2f} % to follow steps, {100 * spent / over:.2f} % to look closer"
    )


def _ending(run: Run) -> str:
    status = run.exit_status
    if status is None:
        return ""
    if status == 0:
        return "; the job succeeded"
    if run.ended_for_hang:
        return "; the job hung and was ended"
    if run.ended_by_debugger:
        return "; the job was ended by the debugger"
    from ddpdoctor.analysis.exit_statuses import signal_name

    how = f"ended by {signal_name(-status)}" if status < 0 else f"failed with exit status {status}"
    asked = " after it was asked to stop" if run.stopped_at is not None else ""
    return f"; the job {how}{asked}"
