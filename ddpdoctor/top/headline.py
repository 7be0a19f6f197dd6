"""Choose the sentence above the board and the state of the run.

The sentence is, in this order: a hang or a crash that the supervisor reported; a rank that died,
waits, is stopped or shows no sign of life right now; another finding; the slowest rank. Ranks are
blamed by the time they spend themselves: a rank that waits is a victim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ddpdoctor.core import formatting
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import named
from ddpdoctor.diagnose.speed.pace import ENOUGH, PHASE_NAMES, WARM_UP
from ddpdoctor.top import step_times
from ddpdoctor.top.snapshot import FindingRow, RankRow, Snapshot, Times, Verdict

# -- what is seen of a live run at once: who died, waits, is stopped, or gives no sign of life


STUCK, STUCK_FIRST = 5.0, 30.0
"""Seconds in one phase from which on a rank may be stuck, if its steps are short; and before the
first step, which compiles and fills caches."""

MANY_STEPS = 3.0
"""How many usual steps a phase must last for its rank to be stuck."""

LONG_WAIT = 60.0
"""Seconds from which on waiting is trouble and not a pause."""


@dataclass(frozen=True)
class VerdictFacts:
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
    hung: bool = False
    """The supervisor found that the job makes no progress."""
    attempt: int = 0
    attempts: int | None = None
    """How many the launcher makes at most; None if that is not known."""
    whole: bool = True
    """Whether the times are of the present, so that phases mean something."""


_ALL_SAY = {
    "its process is stopped (SIGSTOP)": "their processes are stopped (SIGSTOP)",
    "its process is traced": "their processes are traced",
    "its process waits for a disk": "their processes wait for a disk",
}
"""What several ranks say of themselves that each says alike."""


def standstill_verdict(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
    """What keeps a live run from training; None if nothing does."""
    looks = (_dead, _starting, _debugged, _stale, _stuck, _quiet)
    return next((found for look in looks if (found := look(rows, facts)) is not None), None)


def ending_verdict(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict:
    """How a run ended."""
    status = facts.exit_status
    how = "" if facts.since_start is None else f" after {formatting.duration(facts.since_start)}"
    if status == 0:
        return Verdict(f"the job succeeded{how}")
    if facts.asked:
        return Verdict(f"the job was asked to stop, and ended{how}", "info")
    if status is None:
        return Verdict("the run is over; how it ended was not recorded", "warning")
    what = f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
    cause = next((row for row in rows if row.rank in facts.died[:1]), None)
    if cause is None:
        return Verdict(f"the job {what}{how}", "error")
    text = f"the job {what}{how}; rank {cause.rank}: {_one_line(cause.said)}"
    return Verdict(text, "error", cause.rank)


# -- ranks that do not run


def _dead(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
    if facts.asked:
        return Verdict("the job was asked to stop, and is ending", "info")
    dead = {row.rank: row for row in rows if row.state == "dead"}
    if not dead:
        return None
    first = dead[next((rank for rank in facts.died if rank in dead), next(iter(dead)))]
    more = f" (and {len(dead) - 1} more)" if len(dead) > 1 else ""
    text = f"rank {first.rank} died{more}: {_one_line(first.said)}"
    return Verdict(text, "error", first.rank)


def _starting(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
    if any(row.state != "starting" for row in rows):
        return None
    if facts.held:
        verb = "waits" if len(facts.held) == 1 else "wait"
        who = named(facts.held)
        return Verdict(f"starting: {who} {verb} for a debugger (`ddpdoctor attach`)", "info")
    age = "" if facts.since_start is None else f", for {formatting.duration(facts.since_start)}"
    if not rows:
        return Verdict(f"starting: no rank has joined yet{age}", "info")
    of = f" of {facts.world_size}" if (facts.world_size or 0) > len(rows) else ""
    ranks = "rank has" if len(rows) == 1 and not of else "ranks have"
    return Verdict(f"starting: {len(rows)}{of} {ranks} joined, none trains yet{age}", "info")


def _debugged(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
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


def _stale(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
    stale = [row for row in rows if row.state == "stale"]
    if not stale:
        return None
    worst = max(stale, key=lambda row: row.heartbeat or 0.0)
    said = worst.said
    if len(stale) > 1:
        said = _ALL_SAY.get(said, "") if len({row.said for row in stale}) == 1 else ""
    why = f": {_one_line(said)}" if said else ""
    age = formatting.duration(worst.heartbeat or 0.0)
    return _verdict(f"no heartbeat from {_named(stale)} for {age}{why}", "error", worst)


# -- ranks that wait


def _stuck(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
    """Ranks that stay in a collective, and the one they wait for."""
    waiting = _in_a_collective(rows, facts.usual)
    if not waiting or len(rows) < 2:
        return None
    held = {row.rank for row in waiting}
    others = [row for row in rows if row.state in ("running", "starting") and row.rank not in held]
    if len(others) > len(waiting):
        return None
    age = min(row.since or 0.0 for row in waiting)
    who, what, how_long = (
        _waiting(waiting, len(rows)),
        _collectives(waiting),
        formatting.duration(age),
    )
    text = f"{who} in {what} for {how_long}"
    if others:
        last = max(others, key=lambda row: row.since or 0.0)
        text += f", for {_named(others)}{_where(last) if len(others) == 1 else ''}"
        return _verdict(text, "warning" if age >= LONG_WAIT else "info", last)
    left = [row for row in rows if row.state == "ended"]
    if left:
        return _verdict(f"{text}; {_named(left)} {_has(left)} already ended", "error", left[0])
    if _calls_differ(waiting):
        return _verdict(f"{who} for {how_long}, not in the same call: {what}", "error")
    return _verdict(text, "error" if age >= LONG_WAIT else "warning")


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


def _quiet(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
    """No rank does a step: a validation, a checkpoint, or a hang that only the GPU sees."""
    running = [row for row in rows if row.state == "running"]
    if facts.usual is None or not running:
        return None
    age = min(row.since or 0.0 for row in running)
    if age < max(STUCK_FIRST, 10 * facts.usual.total):
        return None
    phases = {row.phase for row in running}
    what = PHASE_NAMES["other"] if phases == {"other"} else ", ".join(sorted(phases))
    text = f"no step for {formatting.duration(age)}: the ranks are in {what}{_place(running[0])}"
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


# -- words


def _verdict(text: str, level: str, blamed: RankRow | None = None) -> Verdict:
    return Verdict(_one_line(text), level, None if blamed is None else blamed.rank)


def _named(rows: Sequence[RankRow]) -> str:
    return named(row.rank for row in rows)


def _one_line(text: str) -> str:
    return " ".join(text.split())


# -- whether a rank holds the others up: what the rules found, and where its time goes


STRAGGLERS = ("DDP610", "DDP612")
"""What the rules call a rank, and a stage of a pipeline, that the others wait for."""


def speed_verdict(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict:
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
    pace = "" if facts.usual is None else f" ({formatting.duration(facts.usual.total)} a step)"
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


# -- the sentence above the board, and the state of the run


_NEWS = ("warning", "error")


def judge(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict:
    """The sentence on a run."""
    standing = ordered_findings([row for row in facts.findings if row.attempt == facts.attempt])
    worst = standing[0].finding if standing else None
    if not facts.live and facts.whole:
        return _ending_with_finding(ending_verdict(rows, facts), worst)
    slow = speed_verdict(rows, facts)
    if worst is not None and stops_the_job(worst) and not facts.asked:
        return _finding_verdict(worst, slow)
    trouble = standstill_verdict(rows, facts) if facts.whole else None
    if trouble is not None and trouble.level in _NEWS:
        return trouble
    if worst is not None and worst.severity >= Severity.ERROR:
        return _finding_verdict(worst, slow)
    if trouble is not None:
        return trouble
    if worst is not None and worst.severity >= Severity.WARNING:
        return _finding_verdict(worst, slow)
    return slow


def _ending_with_finding(end: Verdict, worst: Finding | None) -> Verdict:
    """How a run ended, and what was wrong with it."""
    if worst is None or worst.severity < Severity.WARNING:
        return end
    if end.level == "error" and worst.severity < Severity.ERROR:
        return end
    # The finding says better what the rank's last words said.
    text, _, _ = end.text.partition("; ")
    found = _finding_verdict(worst, end)
    return replace(found, text=f"{text}; {found.text}")


def ordered_findings(findings: Sequence[FindingRow]) -> list[FindingRow]:
    """Hangs and crashes first, then the worst, and of those the newest."""
    return sorted(
        findings,
        key=lambda row: (-stops_the_job(row.finding), -row.finding.severity, -(row.time or 0.0)),
    )


def stops_the_job(finding: Finding) -> bool:
    """Whether it is a hang or a crash: a job cannot go on with it."""
    return finding.severity >= Severity.ERROR and finding.code[3:4] in ("4", "8", "9")


def _finding_text(finding: Finding) -> str:
    return f"{finding.code}: {' '.join(finding.message.split())}"


def _finding_verdict(finding: Finding, slow: Verdict) -> Verdict:
    """A finding as the sentence; it blames its rank, or else whoever is slow."""
    rank = finding.ranks[0] if finding.ranks else slow.rank
    phase = slow.phase if slow.rank == rank else ""
    return Verdict(_finding_text(finding), finding.severity.label, rank, phase)


def run_state(rows: Sequence[RankRow], facts: VerdictFacts, found: Verdict) -> str:
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
    still = bool(ages) and min(ages) >= LONG_WAIT and found.level == "error"
    return "hung" if facts.hung or still else "running"


def judged_snapshot(
    snapshot: Snapshot,
    rows: Sequence[RankRow],
    facts: VerdictFacts,
    judge: Callable[[Sequence[RankRow], VerdictFacts], Verdict] = judge,
) -> Snapshot:
    """A snapshot with ranks: their order, their medians, the sentence on them, and their state."""
    every = [(row.state, row.times) for row in rows if row.times is not None]
    # Of a run that is over, those of the dead are as good as any.
    timed = [each for state, each in every if state != "dead" or not facts.live]
    facts = replace(facts, usual=step_times.median_times(timed))
    found = judge(rows, facts)
    return replace(
        snapshot,
        verdict=found,
        state=run_state(rows, facts, found),
        ranks=step_times.ordered_rows(rows, found.rank),
        median=facts.usual,
        skew=step_times.skew(timed),
    )
