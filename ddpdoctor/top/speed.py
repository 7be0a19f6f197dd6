"""Whether a rank holds the others up: what the rules found, and where its time goes."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.analysis.pace import ENOUGH, PHASE_NAMES, WARM_UP
from ddpdoctor.core import units
from ddpdoctor.top.snapshot import RankRow, Times, Verdict
from ddpdoctor.top.verdict import Facts

STRAGGLERS = ("DDP610", "DDP612")
"""What the rules call a rank, and a stage of a pipeline, that the others wait for."""


def speed(rows: Sequence[RankRow], facts: Facts) -> Verdict:
    """The verdict on how fast the ranks are: that of the rules, which judge more steps."""
    timed = [row for row in rows if row.times is not None and row.state not in ("ended", "dead")]
    fewest = min((row.step or 0 for row in timed), default=0)
    found = (row.finding for row in facts.findings if row.attempt == facts.attempt)
    slow = next((each for each in found if each.code in STRAGGLERS and each.ranks), None)
    if slow is not None:
        rank = slow.ranks[0]
        times = next((row.times for row in timed if row.rank == rank), None)
        return Verdict(slow.message, slow.severity.label, rank, _slow_phase(times, facts.usual))
    if fewest < WARM_UP + ENOUGH:
        return Verdict("the first steps: too early to say who is slow", "info")
    pace = "" if facts.usual is None else f" ({units.duration(facts.usual.total)} a step)"
    text = "no rank holds the others up" if len(rows) > 1 else "the job is running"
    return Verdict(f"{text}{pace}")


def _slow_phase(times: Times | None, usual: Times | None) -> str:
    """The phase in which a rank exceeds the median rank most; empty if in none."""
    if times is None or usual is None:
        return ""
    names = [name for name in PHASE_NAMES if times.split or name != "backward"]
    surplus = {name: getattr(times, name) - getattr(usual, name) for name in names}
    slow = max(names, key=surplus.__getitem__)
    return slow if surplus[slow] > 0 else ""
