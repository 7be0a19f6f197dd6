"""The sentence above the board, and the state of the run.

The sentence is the finding that stands, if there is one: hangs and crashes first, as the supervisor
proved them, then what is seen at this moment, then what else was found, then who is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.top import times
from ddpdoctor.top.snapshot import FindingRow, RankRow, Snapshot, Verdict
from ddpdoctor.top.speed import speed
from ddpdoctor.top.verdict import LONG, Facts, ended, seen

_NEWS = ("warning", "error")


def judge(rows: Sequence[RankRow], facts: Facts) -> Verdict:
    """The sentence on a run."""
    standing = ordered([row for row in facts.findings if row.attempt == facts.attempt])
    worst = standing[0].finding if standing else None
    if not facts.live and facts.whole:
        return _over(ended(rows, facts), worst)
    slow = speed(rows, facts)
    if worst is not None and grave(worst) and not facts.asked:
        return _of(worst, slow)
    trouble = seen(rows, facts) if facts.whole else None
    if trouble is not None and trouble.level in _NEWS:
        return trouble
    if worst is not None and worst.severity >= Severity.ERROR:
        return _of(worst, slow)
    if trouble is not None:
        return trouble
    if worst is not None and worst.severity >= Severity.WARNING:
        return _of(worst, slow)
    return slow


def _over(end: Verdict, worst: Finding | None) -> Verdict:
    """How a run ended, and what was wrong with it."""
    if worst is None or worst.severity < Severity.WARNING:
        return end
    if end.level == "error" and worst.severity < Severity.ERROR:
        return end
    # The finding says better what the rank's last words said.
    text, _, _ = end.text.partition("; ")
    found = _of(worst, end)
    return replace(found, text=f"{text}; {found.text}")


def ordered(findings: Sequence[FindingRow]) -> list[FindingRow]:
    """Hangs and crashes first, then the worst, and of those the newest."""
    return sorted(
        findings,
        key=lambda row: (-grave(row.finding), -row.finding.severity, -(row.time or 0.0)),
    )


def grave(finding: Finding) -> bool:
    """Whether it is a hang or a crash: a job cannot go on with it."""
    return finding.severity >= Severity.ERROR and finding.code[3:4] in ("4", "8", "9")


def _said(finding: Finding) -> str:
    return f"{finding.code}: {' '.join(finding.message.split())}"


def _of(finding: Finding, slow: Verdict) -> Verdict:
    """A finding as the sentence; it blames its rank, or else whoever is slow."""
    rank = finding.ranks[0] if finding.ranks else slow.rank
    phase = slow.phase if slow.rank == rank else ""
    return Verdict(_said(finding), finding.severity.label, rank, phase)


def state(rows: Sequence[RankRow], facts: Facts, found: Verdict) -> str:
    """One of `ddpdoctor.top.snapshot.STATES`."""
    if not facts.live:
        failed = facts.exit_status not in (0, None) and not facts.asked
        return "failed" if failed else "ended"
    if any(row.state == "dead" for row in rows) and not facts.asked:
        again = facts.attempts is not None and facts.attempt + 1 < facts.attempts
        return "restarting" if again else "failing"
    if all(row.state == "starting" for row in rows):
        return "restarting" if facts.attempt and not facts.held else "starting"
    ages = [row.since or 0.0 for row in rows if row.state == "running"]
    still = bool(ages) and min(ages) >= LONG and found.level == "error"
    return "hung" if facts.hung or still else "running"


def judged(
    snapshot: Snapshot,
    rows: Sequence[RankRow],
    facts: Facts,
    judge: Callable[[Sequence[RankRow], Facts], Verdict] = judge,
) -> Snapshot:
    """A snapshot with ranks: their order, their medians, the sentence on them, and their state."""
    every = [(row.state, row.times) for row in rows if row.times is not None]
    # Of a run that is over, those of the dead are as good as any.
    timed = [each for state, each in every if state != "dead" or not facts.live]
    facts = replace(facts, usual=times.of_ranks(timed))
    found = judge(rows, facts)
    return replace(
        snapshot,
        verdict=found,
        state=state(rows, facts, found),
        ranks=times.ordered(rows, found.rank),
        median=facts.usual,
        skew=times.skew(timed),
    )
