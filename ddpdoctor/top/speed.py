"""Which rank holds the others up, by how much, and in which phase: by medians over steps."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.analysis.pace import DATA_SHARE, NOTICEABLE, PHASE_NAMES, UNEVEN, WARM_UP, stands_out
from ddpdoctor.core import units
from ddpdoctor.core.ranks import named
from ddpdoctor.top.snapshot import RankRow, Times, Verdict
from ddpdoctor.top.times import middle
from ddpdoctor.top.verdict import Facts

ENOUGH = 5
"""Steps of each rank that a verdict on speed needs."""


def speed(rows: Sequence[RankRow], facts: Facts) -> Verdict:
    """The verdict on how fast the ranks are."""
    timed = [row for row in rows if row.times is not None and row.state not in ("ended", "dead")]
    fewest = min((row.step or 0 for row in timed), default=0)
    if not timed or facts.seen < ENOUGH or fewest < WARM_UP:
        return Verdict("the first steps: too early to say who is slow", "info")
    known = {row.rank: row.times for row in timed if row.times is not None}
    stages = {row.rank: row.stage for row in timed}
    return _straggler(known, stages) or _data_bound(list(known.values())) or _healthy(timed, facts)


def _straggler(timed: dict[int, Times], stages: dict[int, str]) -> Verdict | None:
    if len(timed) < 2:
        return None
    # Which part of a backward was a wait is known of all, or else not used of any.
    split = all(each.split for each in timed.values())
    spent = _spent(timed, split)
    # Who has no core is slow by no fault of its work.
    own = {rank: max(spent[rank] - each.lacked, 0.0) for rank, each in timed.items()}
    waits = {rank: each.total - spent[rank] for rank, each in timed.items()}
    worst = max(own, key=lambda rank: own[rank])
    surplus = own[worst] - _of_others(own, worst)
    relief = _of_others(waits, worst) - waits[worst]
    total = timed[worst].total - timed[worst].lacked
    if not stands_out(surplus * 1e9, total * 1e9, relief * 1e9):
        return None
    # Ranks that are as slow are no victims: the others would wait for them just the same.
    slow = sorted(rank for rank in timed if own[rank] > own[worst] - surplus / 2)
    rest = [rank for rank in timed if rank not in slow]
    usual = middle(own[rank] for rank in rest)
    if _has_stages_of_its_own(slow, rest, stages) and own[worst] < UNEVEN * usual:
        return None
    names = [name for name in PHASE_NAMES if split or name != "backward"]
    phases = _slow_phases([timed[rank] for rank in slow], [timed[rank] for rank in rest], names)
    gap = own[worst] - usual
    return _slow_ranks(slow, _shared_stage(slow, stages), gap, gap / total, phases)


def _spent(timed: dict[int, Times], split: bool) -> dict[int, float]:
    """What each rank spent itself for certain: of a backward that was not split, nothing."""
    return {rank: each.own if split else each.own - each.backward for rank, each in timed.items()}


def _of_others(times: dict[int, float], rank: int) -> float:
    return middle(times[other] for other in times if other != rank)


def _has_stages_of_its_own(
    slow: Sequence[int], rest: Sequence[int], stages: dict[int, str]
) -> bool:
    """Whether no other rank is of a stage that slow ranks are of: stages differ in their work."""
    return {stages[rank] for rank in slow}.isdisjoint(stages[rank] for rank in rest)


def _shared_stage(slow: Sequence[int], stages: dict[int, str]) -> str:
    found = {stages[rank] for rank in slow}
    return found.pop() if len(found) == 1 else ""


def _slow_phases(slow: Sequence[Times], rest: Sequence[Times], names: Sequence[str]) -> set[str]:
    """The phases in which slow ranks exceed the rest most."""
    usual = {name: middle(getattr(each, name) for each in rest) for name in names}
    return {max(names, key=lambda name: getattr(each, name) - usual[name]) for each in slow}


def _slow_ranks(
    slow: Sequence[int], stage: str, gap: float, share: float, phases: set[str]
) -> Verdict:
    who = named(slow)
    who = who if len(who) <= 30 else f"{len(slow)} ranks"
    who = f"stage {stage} ({who})" if stage else who
    verb, whose = ("hold", "their") if len(slow) > 1 and not stage else ("holds", "its")
    text = f"{who} {verb} the others up by {units.duration(gap)} a step ({share:.0%})"
    phase = phases.pop() if len(phases) == 1 else ""
    where = f", in {whose} {PHASE_NAMES[phase]}" if phase else ""
    # Of equally slow ranks always the same one comes first, so that nothing jumps.
    return Verdict(text + where, "warning", slow[0], phase)


def _data_bound(timed: Sequence[Times]) -> Verdict | None:
    shares = [(each.data / each.total, each.data) for each in timed if each.total > 0]
    bound = [each for each in shares if each[0] > DATA_SHARE and each[1] >= NOTICEABLE / 1e9]
    if 2 * len(bound) <= len(shares):
        return None
    share, wait = max(bound)
    who = f"{len(bound)} of {len(shares)} ranks wait" if len(shares) > 1 else "the rank waits"
    if len(bound) == len(shares) > 1:
        who = "both ranks wait" if len(shares) == 2 else f"all {len(shares)} ranks wait"
    text = f"{who} for data: up to {share:.0%} of a step, {units.duration(wait)}"
    return Verdict(text, "warning")


def _healthy(rows: Sequence[RankRow], facts: Facts) -> Verdict:
    pace = "" if facts.usual is None else f" ({units.duration(facts.usual.total)} a step)"
    text = "no rank holds the others up" if len(rows) > 1 else "the job is running"
    return Verdict(f"{text}{pace}")
