"""The one sentence above the board: who holds the job up, by what, and nothing else.

Ranks are blamed by the time they spend themselves. Who waits is a victim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ddpdoctor.analysis.pace import DATA_SHARE, NOTICEABLE, PHASE_NAMES, UNEVEN, WARM_UP, stands_out
from ddpdoctor.core import units
from ddpdoctor.core.ranks import named
from ddpdoctor.top import times
from ddpdoctor.top.snapshot import FindingRow, RankRow, Snapshot, Times, Verdict
from ddpdoctor.top.times import middle

ENOUGH = 5
"""Steps of each rank that a verdict on speed needs."""

STUCK, STUCK_FIRST = 5.0, 30.0
"""Seconds in one phase from which on a rank may be stuck, if its steps are short; and before the
first step, which compiles and fills caches."""

MANY_STEPS = 3.0
"""How many usual steps a phase must last for its rank to be stuck."""

LONG = 60.0
"""Seconds from which on waiting is trouble and not a pause."""


@dataclass(frozen=True)
class Facts:
    """What the verdict on a run is made of, beside its ranks."""

    live: bool
    exit_status: int | None = None
    asked: bool = False
    """Whether the job was asked to stop."""
    world_size: int | None = None
    since_start: float | None = None
    """Seconds."""
    died: tuple[int, ...] = ()
    """The ranks that died, the first first."""
    seen: int = 0
    """Steps of each rank that the medians are made of, at least."""
    held: tuple[int, ...] = ()
    """Ranks that wait for a debugger."""
    usual: Times | None = None
    """The median rank's steps."""
    findings: tuple[FindingRow, ...] = ()
    whole: bool = True
    """Whether the times are of the present, so that phases mean something."""


_MOST = 100
"""Characters of a verdict."""

_ALL_SAY = {
    "its process is stopped (SIGSTOP)": "their processes are stopped (SIGSTOP)",
    "its process is traced": "their processes are traced",
    "its process waits for a disk": "their processes wait for a disk",
}
"""What several ranks say of themselves that each says alike."""


def judge(rows: Sequence[RankRow], facts: Facts) -> Verdict:
    """The verdict on a run."""
    if facts.whole:
        looks = (_ended, _dead, _starting, _debugged, _stale, _stuck, _quiet)
        for found in (look(rows, facts) for look in looks):
            if found is not None:
                return found
    return _speed(rows, facts)


def judged(
    snapshot: Snapshot,
    rows: Sequence[RankRow],
    facts: Facts,
    judge: Callable[[Sequence[RankRow], Facts], Verdict] = judge,
) -> Snapshot:
    """A snapshot with ranks: their order, their medians, and the verdict on them."""
    timed = [row.times for row in rows if row.times is not None and row.state != "dead"]
    usual = times.of_ranks(timed)
    found = judge(rows, replace(facts, usual=usual))
    return replace(
        snapshot,
        verdict=found,
        ranks=times.ordered(rows, found.rank),
        median=usual,
        skew=times.skew(timed),
    )


# -- the end, and the beginning


def _ended(rows: Sequence[RankRow], facts: Facts) -> Verdict | None:
    status = facts.exit_status
    if facts.live:
        return None
    how = "" if facts.since_start is None else f" after {units.duration(facts.since_start)}"
    if status == 0:
        return Verdict(f"the job succeeded{how}")
    if facts.asked:
        return Verdict(f"the job was asked to stop, and ended{how}", "info")
    if status is None:
        return Verdict("the run is over; how it ended was not recorded", "warning")
    what = f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
    cause = next((row for row in rows if row.rank in facts.died[:1]), None)
    if cause is None:
        return Verdict(f"the job {what}", "error")
    text = f"the job {what}; rank {cause.rank}: {_clip(cause.said, 64)}"
    return Verdict(text, "error", cause.rank)


def _dead(rows: Sequence[RankRow], facts: Facts) -> Verdict | None:
    if facts.asked:
        return Verdict("the job was asked to stop, and is ending", "info")
    dead = {row.rank: row for row in rows if row.state == "dead"}
    if not dead:
        return None
    first = dead[next((rank for rank in facts.died if rank in dead), next(iter(dead)))]
    more = f" (and {len(dead) - 1} more)" if len(dead) > 1 else ""
    text = f"rank {first.rank} died{more}: {_clip(first.said, 64)}"
    return Verdict(text, "error", first.rank)


def _starting(rows: Sequence[RankRow], facts: Facts) -> Verdict | None:
    if any(row.state != "starting" for row in rows):
        return None
    if facts.held:
        verb = "waits" if len(facts.held) == 1 else "wait"
        who = named(facts.held)
        return Verdict(f"starting: {who} {verb} for a debugger (`ddpdoctor attach`)", "info")
    age = "" if facts.since_start is None else f", for {units.duration(facts.since_start)}"
    if not rows:
        return Verdict(f"starting: no rank has joined yet{age}", "info")
    of = f" of {facts.world_size}" if (facts.world_size or 0) > len(rows) else ""
    ranks = "rank has" if len(rows) == 1 and not of else "ranks have"
    return Verdict(f"starting: {len(rows)}{of} {ranks} joined, none trains yet{age}", "info")


def _debugged(rows: Sequence[RankRow], facts: Facts) -> Verdict | None:
    held = [row for row in rows if row.state == "debugger"]
    if not held:
        return None
    stopped = held[0].said.startswith(("stands", "waits"))
    others = stopped and any(row.state == "running" for row in rows)
    what = f"{'are' if len(held) > 1 else 'is'} in the debugger"
    if len(held) == 1 and held[0].said:
        what = held[0].said
    waiting = ": the others wait for it" if others else ""
    return _verdict(f"{_named(held)} {what}{waiting}", "info", held[0])


def _stale(rows: Sequence[RankRow], facts: Facts) -> Verdict | None:
    stale = [row for row in rows if row.state == "stale"]
    if not stale:
        return None
    worst = max(stale, key=lambda row: row.heartbeat or 0.0)
    said = worst.said
    if len(stale) > 1:
        said = _ALL_SAY.get(said, "") if len({row.said for row in stale}) == 1 else ""
    why = f": {_clip(said, 40)}" if said else ""
    age = units.duration(worst.heartbeat or 0.0)
    return _verdict(f"no heartbeat from {_named(stale)} for {age}{why}", "error", worst)


# -- ranks that wait


def _stuck(rows: Sequence[RankRow], facts: Facts) -> Verdict | None:
    """Ranks that stay in a collective, and the one they wait for."""
    waiting = _in_a_collective(rows, facts.usual)
    if not waiting or len(rows) < 2:
        return None
    held = {row.rank for row in waiting}
    others = [row for row in rows if row.state in ("running", "starting") and row.rank not in held]
    if len(others) > len(waiting):
        return None
    age = min(row.since or 0.0 for row in waiting)
    who, what, how_long = _waiting(waiting, len(rows)), _collectives(waiting), units.duration(age)
    text = f"{who} in {what} for {how_long}"
    if others:
        last = max(others, key=lambda row: row.since or 0.0)
        text += f", for {_named(others)}{_where(last) if len(others) == 1 else ''}"
        return _verdict(text, "warning" if age >= LONG else "info", last)
    left = [row for row in rows if row.state == "ended"]
    if left:
        return _verdict(f"{text}; {_named(left)} {_has(left)} already ended", "error", left[0])
    if _calls_differ(waiting):
        return _verdict(f"{who} for {how_long}, not in the same call: {what}", "error")
    return _verdict(text, "error" if age >= LONG else "warning")


def _calls_differ(waiting: Sequence[RankRow]) -> bool:
    return len({row.collective or row.phase for row in waiting}) > 1


def _has(rows: Sequence[RankRow]) -> str:
    return "have" if len(rows) > 1 else "has"


def _in_a_collective(rows: Sequence[RankRow], usual: Times | None) -> list[RankRow]:
    """The ranks that have been in a collective for long."""
    patience = STUCK_FIRST if usual is None else max(STUCK, MANY_STEPS * usual.total)
    running = [row for row in rows if row.state == "running" and (row.since or 0) >= patience]
    return [row for row in running if row.phase in ("wait", "backward")]


def _where(row: RankRow) -> str:
    """What the rank does that the others wait for."""
    if row.state == "starting":
        return ", which has not begun"
    return f", which is in {row.phase}{_place(row)}"


def _quiet(rows: Sequence[RankRow], facts: Facts) -> Verdict | None:
    """No rank does a step: a validation, a checkpoint, or a hang that only the GPU sees."""
    running = [row for row in rows if row.state == "running"]
    if facts.usual is None or not running:
        return None
    age = min(row.since or 0.0 for row in running)
    if age < max(STUCK_FIRST, 10 * facts.usual.total):
        return None
    phases = {row.phase for row in running}
    what = PHASE_NAMES["other"] if phases == {"other"} else ", ".join(sorted(phases))
    text = f"no step for {units.duration(age)}: the ranks are in {what}{_place(running[0])}"
    return _verdict(text, "info")


def _waiting(waiting: Sequence[RankRow], of: int) -> str:
    """Who waits."""
    if len(waiting) == of:
        return "both ranks wait" if of == 2 else f"all {of} ranks wait"
    return f"rank {waiting[0].rank} waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"


def _collectives(waiting: Sequence[RankRow]) -> str:
    """``all_reduce``, or ``all_reduce (ranks 0-2), barrier (rank 3)``."""
    calls: dict[str, list[int]] = {}
    for row in waiting:
        backward = "the backward's all-reduce" if row.phase == "backward" else row.phase
        calls.setdefault(row.collective or backward, []).append(row.rank)
    if len(calls) == 1:
        return next(iter(calls))
    return ", ".join(f"{name} ({named(ranks)})" for name, ranks in calls.items())


def _place(row: RankRow) -> str:
    return f" ({row.site.rpartition('/')[2]})" if row.site else ""


# -- speed


def _speed(rows: Sequence[RankRow], facts: Facts) -> Verdict:
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

    def spent(each: Times) -> float:
        return each.own if split else each.own - each.backward

    # Who has no core is slow by no fault of its work.
    own = {rank: max(spent(each) - each.lacked, 0.0) for rank, each in timed.items()}
    waits = {rank: each.total - spent(each) for rank, each in timed.items()}
    worst = max(own, key=lambda rank: own[rank])
    others = [rank for rank in timed if rank != worst]
    gap = own[worst] - middle(own[rank] for rank in others)
    relief = middle(waits[rank] for rank in others) - waits[worst]
    total = timed[worst].total - timed[worst].lacked
    if not stands_out(gap * 1e9, total * 1e9, relief * 1e9):
        return None
    # Ranks that are as slow are no victims: the others would wait for them just the same.
    slow = sorted(rank for rank in timed if own[rank] > own[worst] - gap / 2)
    rest = [rank for rank in timed if rank not in slow]
    usual = middle(own[rank] for rank in rest)
    apart = {stages[rank] for rank in slow}.isdisjoint(stages[rank] for rank in rest)
    if apart and own[worst] < UNEVEN * usual:
        return None
    gap = own[worst] - usual
    names = [name for name in PHASE_NAMES if split or name != "backward"]
    phases = _slow_phases([timed[rank] for rank in slow], [timed[rank] for rank in rest], names)
    number = {stages[rank] for rank in slow}
    stage = number.pop() if len(number) == 1 else ""
    return _slow_ranks(slow, stage, gap, gap / total, phases)


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
    where = f", in {whose} {PHASE_NAMES[phases.pop()]}" if len(phases) == 1 else ""
    # Of equally slow ranks always the same one comes first, so that nothing jumps.
    return Verdict(text + where, "warning", slow[0])


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
    text = ("no rank holds the others up" if len(rows) > 1 else "the job is running") + pace
    counts = Counter(row.finding.severity.label for row in facts.findings)
    found = [units.count(counts[label], label) for label in ("error", "warning") if counts[label]]
    if not found:
        return Verdict(text)
    level = "error" if counts["error"] else "warning"
    return Verdict(f"{text}; found so far: {', '.join(found)}", level)


# -- words


def _verdict(text: str, level: str, blamed: RankRow | None = None) -> Verdict:
    return Verdict(_clip(text, _MOST), level, None if blamed is None else blamed.rank)


def _named(rows: Sequence[RankRow]) -> str:
    return named(row.rank for row in rows)


def _clip(text: str, size: int) -> str:
    """At most so many characters; the end goes."""
    text = " ".join(text.split())
    return text if len(text) <= size else f"{text[: size - 3]}..."
