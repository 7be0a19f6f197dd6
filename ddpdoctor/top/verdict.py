"""The one sentence above the board: who holds the job up, by what, and nothing else.

Ranks are blamed by the time they spend themselves. Who waits is a victim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddpdoctor.analysis.pace import DATA_SHARE, NOTICEABLE, PHASE_NAMES, WARM_UP, stands_out
from ddpdoctor.core.ranks import named
from ddpdoctor.top import times as medians
from ddpdoctor.top.snapshot import FindingRow, RankRow, Times, Verdict

ENOUGH = 5
"""Steps of each rank that a verdict on speed needs."""

STUCK = 5.0
"""Seconds in one phase from which on a rank may be stuck, if its steps are short."""

STUCK_FIRST = 30.0
"""The same before the first step: compiling, building caches."""

MANY_STEPS = 3.0
"""How many usual steps a phase must last for its rank to be stuck."""

LONG = 60.0
"""Seconds from which on waiting is a trouble and not a pause."""


@dataclass(frozen=True)
class Facts:
    """What the verdict on a run is made of, beside its ranks."""

    live: bool
    exit_status: int | None = None
    asked: bool = False
    """Whether somebody asked the job to stop."""
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


def judge(rows: Sequence[RankRow], facts: Facts) -> Verdict:
    """The verdict on a run."""
    if facts.whole:
        told = _ended(rows, facts) or _dead(rows, facts) or _begins(rows, facts)
        told = told or _debugged(rows) or _stale(rows)
        told = told or _stuck(rows, facts.usual) or _quiet(rows, facts.usual)
        if told is not None:
            return told
    return speed(rows, facts)


def speed(rows: Sequence[RankRow], facts: Facts) -> Verdict:
    """The verdict on how fast the ranks are."""
    timed = [row for row in rows if row.times is not None and row.state not in ("ended", "dead")]
    slowest = min((row.step or 0 for row in timed), default=0)
    if not timed or facts.seen < ENOUGH or slowest < WARM_UP:
        return Verdict("the first steps: too early to say who is slow", "info")
    return _straggler(timed) or _data_bound(timed) or _well(timed, facts)


# -- the end, and the beginning


def _ended(rows: Sequence[RankRow], facts: Facts) -> Verdict | None:
    if facts.live:
        return None
    how = f"after {span(facts.since_start)}" if facts.since_start is not None else ""
    if facts.exit_status == 0:
        return Verdict(f"the job succeeded {how}".rstrip())
    if facts.asked:
        return Verdict(f"the job was asked to stop, and ended {how}".rstrip(), "info")
    if facts.exit_status is None:
        return Verdict("the run is over; how it ended was not recorded", "warning")
    cause = next((row for row in rows if row.rank in facts.died[:1]), None)
    what = (
        f"was ended by signal {-facts.exit_status}"
        if facts.exit_status < 0
        else f"failed with exit status {facts.exit_status}"
    )
    if cause is None:
        return Verdict(f"the job {what}", "error")
    return Verdict(f"the job {what}; rank {cause.rank}: {_clip(cause.said)}", "error", cause.rank)


def _dead(rows: Sequence[RankRow], facts: Facts) -> Verdict | None:
    dead = [row for row in rows if row.state == "dead"]
    if facts.asked:
        return Verdict("the job was asked to stop, and is ending", "info")
    if not dead:
        return None
    first = next((row for rank in facts.died for row in dead if row.rank == rank), dead[0])
    more = f" (and {len(dead) - 1} more)" if len(dead) > 1 else ""
    return Verdict(f"rank {first.rank} died{more}: {_clip(first.said)}", "error", first.rank)


def _begins(rows: Sequence[RankRow], facts: Facts) -> Verdict | None:
    age = f", for {span(facts.since_start)}" if facts.since_start is not None else ""
    if facts.held and not [row for row in rows if row.state != "starting"]:
        who = named(facts.held)
        verb = "waits" if len(facts.held) == 1 else "wait"
        return Verdict(f"starting: {who} {verb} for a debugger (`ddpdoctor attach`)", "info")
    if not rows:
        return Verdict(f"starting: no rank has joined yet{age}", "info")
    starting = [row for row in rows if row.state == "starting"]
    missing = (facts.world_size or 0) - len(rows)
    if len(starting) == len(rows):
        joined = f"{len(rows)} of {facts.world_size}" if missing > 0 else f"{len(rows)}"
        ranks = "rank has" if joined == "1" else "ranks have"
        return Verdict(f"starting: {joined} {ranks} joined, none trains yet{age}", "info")
    return None


def _debugged(rows: Sequence[RankRow]) -> Verdict | None:
    held = [row for row in rows if row.state == "debugger"]
    if not held:
        return None
    others = sum(row.state == "running" for row in rows)
    waiting = ": the others wait for it" if others and _stands(held[0]) else ""
    who = named(row.rank for row in held)
    verb = held[0].said if len(held) == 1 and held[0].said else _are(held, "in the debugger")
    return Verdict(_clip(f"{who} {verb}{waiting}", 100), "info", held[0].rank)


def _stands(row: RankRow) -> bool:
    return row.said.startswith(("stands", "waits"))


def _stale(rows: Sequence[RankRow]) -> Verdict | None:
    stale = [row for row in rows if row.state == "stale"]
    if not stale:
        return None
    worst = max(stale, key=lambda row: row.heartbeat or 0.0)
    who = named(row.rank for row in stale)
    same = len({row.said for row in stale}) == 1
    said = worst.said if len(stale) == 1 else _ALL_SAY.get(worst.said, "") if same else ""
    why = f": {_clip(said, 40)}" if said else ""
    text = f"no sign of life from {who} for {span(worst.heartbeat or 0.0)}{why}"
    return Verdict(_clip(text, 100), "error", worst.rank)


_ALL_SAY = {
    "its process is stopped (SIGSTOP)": "their processes are stopped (SIGSTOP)",
    "its process is traced": "their processes are traced",
    "its process waits for a disk": "their processes wait for a disk",
}


# -- ranks that wait


def _stuck(rows: Sequence[RankRow], usual: Times | None) -> Verdict | None:
    """Ranks that stay in a collective, and the one they wait for."""
    patience = STUCK_FIRST if usual is None else max(STUCK, MANY_STEPS * usual.total)
    running = [row for row in rows if row.state == "running"]
    waiting = [
        row for row in running if row.phase in ("wait", "backward") and (row.since or 0) >= patience
    ]
    if not waiting or len(rows) < 2:
        return None
    age = min(row.since or 0.0 for row in waiting)
    level = "error" if age >= LONG else "warning"
    held = {row.rank for row in waiting}
    left = [row for row in rows if row.state == "ended"]
    others = [row for row in rows if row.state in ("running", "starting") and row.rank not in held]
    who = _many(waiting, len(rows))
    what = _collectives(waiting)
    if left and not others:
        gone = _are(left, "already ended", verb=("has", "have"))
        text = f"{who} in {what} for {span(age)}; {named(r.rank for r in left)} {gone}"
        return Verdict(_clip(text, 100), "error", left[0].rank)
    if not others:
        if len({row.collective or row.phase for row in waiting}) > 1:
            return Verdict(
                _clip(f"{who} for {span(age)}, not in the same call: {what}", 100), "error"
            )
        return Verdict(_clip(f"{who} in {what} for {span(age)}", 100), level)
    if len(others) > len(waiting):
        return None
    last = max(others, key=lambda row: row.since or 0.0)
    place = f" ({short(last.site)})" if last.site else ""
    whom = named(row.rank for row in others)
    where = "has not begun" if last.state == "starting" else f"is in {last.phase}{place}"
    what_else = f", which {where}" if len(others) == 1 else ""
    text = f"{who} in {what} for {span(age)}, for {whom}{what_else}"
    return Verdict(_clip(text, 100), "warning" if age >= LONG else "info", last.rank)


def _quiet(rows: Sequence[RankRow], usual: Times | None) -> Verdict | None:
    """No rank does a step: a validation, a checkpoint, or a hang that only the GPU sees."""
    running = [row for row in rows if row.state == "running"]
    if usual is None or not running:
        return None
    age = min(row.since or 0.0 for row in running)
    if age < max(STUCK_FIRST, 10 * usual.total):
        return None
    phases = {row.phase for row in running}
    what = "code between the phases" if phases == {"other"} else ", ".join(sorted(phases))
    place = f" ({short(running[0].site)})" if running[0].site else ""
    return Verdict(_clip(f"no step for {span(age)}: the ranks are in {what}{place}", 100), "info")


def _many(waiting: Sequence[RankRow], of: int) -> str:
    if len(waiting) == of:
        return "both ranks wait" if of == 2 else f"all {of} ranks wait"
    if len(waiting) == 1:
        return f"rank {waiting[0].rank} waits"
    return f"{len(waiting)} ranks wait"


def _collectives(waiting: Sequence[RankRow]) -> str:
    """``all_reduce``, or ``all_reduce (ranks 0-2), barrier (rank 3)``."""
    calls: dict[str, list[int]] = {}
    for row in waiting:
        calls.setdefault(_collective(row), []).append(row.rank)
    if len(calls) == 1:
        return next(iter(calls))
    return ", ".join(f"{name} ({named(ranks)})" for name, ranks in calls.items())


def _collective(row: RankRow) -> str:
    return row.collective or ("the backward's all-reduce" if row.phase == "backward" else row.phase)


# -- speed


def _straggler(rows: Sequence[RankRow]) -> Verdict | None:
    timed = {row.rank: row.times for row in rows if row.times is not None}
    if len(timed) < 2:
        return None
    # Which part of a backward was a wait is known of all, or else not used of any.
    split = all(each.split for each in timed.values())

    def spent(times: Times) -> float:
        return times.own if split else times.own - times.backward

    def own(times: Times) -> float:
        # Who has no core is slow by no fault of its work.
        return max(spent(times) - times.lacked, 0.0)

    worst = max(timed, key=lambda rank: own(timed[rank]))
    mine = timed[worst]
    others = [each for rank, each in timed.items() if rank != worst]
    gap = own(mine) - medians.middle(own(each) for each in others)
    waits = medians.middle(each.total - spent(each) for each in others)
    relief = waits - (mine.total - spent(mine))
    total = mine.total - mine.lacked
    if not stands_out(gap * 1e9, total * 1e9, relief * 1e9):
        return None
    # Ranks that are as slow are no victims: the others would wait for them just the same.
    slow = sorted(rank for rank in timed if own(timed[rank]) > own(mine) - gap / 2)
    others = [each for rank, each in timed.items() if rank not in slow]
    gap = own(mine) - medians.middle(own(each) for each in others)
    names = [name for name in PHASE_NAMES if split or name != "backward"]

    def phase(times: Times) -> str:
        surplus = {
            name: getattr(times, name) - medians.middle(getattr(each, name) for each in others)
            for name in names
        }
        return PHASE_NAMES[max(surplus, key=lambda name: surplus[name])]

    many = len(slow) > 1
    verb, whose = ("hold", "their") if many else ("holds", "its")
    who = named(slow)
    if len(who) > 30:
        who = f"{len(slow)} ranks"
    text = f"{who} {verb} the others up by {span(gap)} a step ({gap / total:.0%})"
    phases = {phase(timed[rank]) for rank in slow}
    # Of equally slow ranks always the same one comes first, so that nothing jumps.
    first = slow[0] if many else worst
    where = f", in {whose} {phases.pop()}" if len(phases) == 1 else ""
    return Verdict(text + where, "warning", first)


def _data_bound(rows: Sequence[RankRow]) -> Verdict | None:
    shares = [
        (row.times.data / row.times.total, row.times.data)
        for row in rows
        if row.times is not None and row.times.total > 0
    ]
    bound = [each for each in shares if each[0] > DATA_SHARE and each[1] >= NOTICEABLE / 1e9]
    if 2 * len(bound) <= len(shares):
        return None
    share, wait = max(bound)
    who = f"{len(bound)} of {len(shares)} ranks wait" if len(shares) > 1 else "the rank waits"
    if len(bound) == len(shares) > 1:
        who = "both ranks wait" if len(shares) == 2 else f"all {len(shares)} ranks wait"
    return Verdict(f"{who} for data: up to {share:.0%} of a step, {span(wait)}", "warning")


def _well(rows: Sequence[RankRow], facts: Facts) -> Verdict:
    pace = f" ({span(facts.usual.total)} a step)" if facts.usual is not None else ""
    who = "no rank holds the others up" if len(rows) > 1 else "the job goes its way"
    counts = Counter(row.finding.severity.label for row in facts.findings)
    said = [
        f"{counts[label]} {label}{'s' if counts[label] > 1 else ''}"
        for label in ("error", "warning")
        if counts[label]
    ]
    if not said:
        return Verdict(f"{who}{pace}")
    level = "error" if counts["error"] else "warning"
    return Verdict(f"{who}{pace}; found so far: {', '.join(said)}", level)


# -- words


def span(seconds: float) -> str:
    """A duration for a person: ``31 ms``, ``1.5 s``, ``42 s``, ``12 min``."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def short(site: str) -> str:
    """The last of a path, with its line."""
    return site.rpartition("/")[2]


def _are(rows: Sequence[RankRow], what: str, verb: tuple[str, str] = ("is", "are")) -> str:
    return f"{verb[len(rows) > 1]} {what}"


def _clip(text: str, size: int = 64) -> str:
    """At most so many characters; the end goes."""
    text = " ".join(text.split())
    return text if len(text) <= size else f"{text[: size - 3]}..."
