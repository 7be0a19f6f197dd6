"""Choose the sentence above the board and the state of the run.

The sentence is about, in this order: a hang or a crash that the supervisor reported; a rank that
died, waits, is stopped or shows no sign of life now; another finding; the slowest rank. Only the
rules blame a slow rank: they compare own times over many more steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import duration, named
from ddpdoctor.core.relations import STRAGGLERS
from ddpdoctor.diagnose.speed.pace import ENOUGH, PHASE_NAMES, WARM_UP
from ddpdoctor.top import run_files
from ddpdoctor.top.snapshot import FindingRow, RankRow, Snapshot, Times, Verdict

MIN_STUCK, MIN_STUCK_FIRST = 5.0, 30.0
"""Seconds in one phase after which a rank may be stuck: in general, and before its first step,
which compiles and fills caches."""

MIN_STUCK_STEPS = 3.0  # Minimum duration of a stuck rank's phase, in steps
MIN_TROUBLE = 60.0  # Seconds after which waiting is more than a pause


@dataclass(frozen=True)
class VerdictFacts:
    """The facts for the verdict on a run, besides its ranks."""

    live: bool
    exit_status: int | None = None
    asked: bool = False  # Whether the job was asked to stop
    world_size: int | None = None
    since_start: float | None = None  # Seconds
    died: tuple[int, ...] = ()  # The ranks that died, in order
    held: tuple[int, ...] = ()  # Ranks that wait for a debugger
    usual: Times | None = None  # The median rank's steps
    findings: tuple[FindingRow, ...] = ()
    hung: bool = False  # Whether the supervisor found that the job makes no progress
    attempt: int = 0
    attempts: int | None = None  # Maximum number that the launcher makes. None if unknown.
    whole: bool = True  # Whether the times are current, so that phases are meaningful


def judge(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict:
    """Choose the sentence about a run."""
    standing = ordered_findings([row for row in facts.findings if row.attempt == facts.attempt])
    worst = standing[0].finding if standing else None
    if not facts.live and facts.whole:
        return _ending_verdict(rows, facts, worst)
    slow = _speed_verdict(rows, facts)
    if worst is not None and stops_the_job(worst) and not facts.asked:
        return _finding_verdict(worst, slow)
    trouble = None
    if facts.whole:
        checks = (_dead, _starting, _debugged, _stale, _stuck, _quiet)
        trouble = next((found for check in checks if (found := check(rows, facts))), None)
    if trouble is not None and trouble.level in ("warning", "error"):
        return trouble
    if worst is not None and worst.severity >= Severity.ERROR:
        return _finding_verdict(worst, slow)
    if trouble is not None:
        return trouble
    if worst is not None and worst.severity >= Severity.WARNING:
        return _finding_verdict(worst, slow)
    return slow


def ordered_findings(findings: Sequence[FindingRow]) -> list[FindingRow]:
    """Sort findings: hangs and crashes first, then the worst, and of those the newest."""
    return sorted(
        findings,
        key=lambda row: (-stops_the_job(row.finding), -row.finding.severity, -(row.time or 0.0)),
    )


def stops_the_job(finding: Finding) -> bool:
    """Return whether a finding is a hang or a crash, which stops the job."""
    return finding.severity >= Severity.ERROR and finding.code[3:4] in ("4", "8", "9")


def run_state(rows: Sequence[RankRow], facts: VerdictFacts, found: Verdict) -> str:
    """Return one of `ddpdoctor.top.snapshot.STATES`."""
    if not facts.live:
        failed = facts.exit_status not in (0, None) and not facts.asked
        return "failed" if failed else "ended"
    if any(row.state == "dead" for row in rows) and not facts.asked:
        again = facts.attempts is not None and facts.attempt + 1 < facts.attempts
        return "restarting" if again else "failing"
    if all(row.state == "starting" for row in rows):
        return "restarting" if facts.attempt and not facts.held else "starting"
    ages = [row.since or 0.0 for row in rows if row.state == "running"]
    stuck = bool(ages) and min(ages) >= MIN_TROUBLE and found.level == "error"
    return "hung" if facts.hung or stuck else "running"


def judged_snapshot(
    snapshot: Snapshot,
    rows: Sequence[RankRow],
    facts: VerdictFacts,
    judge: Callable[[Sequence[RankRow], VerdictFacts], Verdict] = judge,
) -> Snapshot:
    """Add ranks to a snapshot: their order and medians, the sentence about them, and the state."""
    # In a finished run, the times of dead ranks count as well.
    timed = [
        row.times
        for row in rows
        if row.times is not None and (row.state != "dead" or not facts.live)
    ]
    facts = replace(facts, usual=run_files.median_times(timed))
    found = judge(rows, facts)
    return replace(
        snapshot,
        verdict=found,
        state=run_state(rows, facts, found),
        ranks=run_files.ordered_rows(rows, found.rank),
        median=facts.usual,
        skew=run_files.skew(timed),
    )


def slow_phase(times: Times | None, usual: Times | None, least: float = 0.0) -> str:
    """Return the phase in which a rank exceeds the median rank most. Empty without one."""
    if times is None or usual is None:
        return ""
    # A backward that was not split may contain waits for others.
    names = [name for name in PHASE_NAMES if times.split or name != "backward"]
    surplus = {name: getattr(times, name) - getattr(usual, name) for name in names}
    slow = max(names, key=surplus.__getitem__)
    return slow if surplus[slow] > least else ""


# -- verdicts by the findings


def _speed_verdict(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict:
    timed = [row for row in rows if row.times is not None and row.state not in ("ended", "dead")]
    found = (row.finding for row in facts.findings if row.attempt == facts.attempt)
    slow = next((each for each in found if each.code in STRAGGLERS and each.ranks), None)
    if slow is not None:
        rank = slow.ranks[0]
        times = next((row.times for row in timed if row.rank == rank), None)
        return Verdict(slow.message, slow.severity.label, rank, slow_phase(times, facts.usual))
    if min((row.step or 0 for row in timed), default=0) < WARM_UP + ENOUGH:
        return Verdict("the first steps: too early to say who is slow", "info")
    pace = "" if facts.usual is None else f" ({duration(facts.usual.total)} a step)"
    text = "no rank holds the others up" if len(rows) > 1 else "the job is running"
    return Verdict(f"{text}{pace}")


def _finding_verdict(finding: Finding, slow: Verdict) -> Verdict:
    """Turn a finding into the sentence, which blames its rank or else the slow one."""
    rank = finding.ranks[0] if finding.ranks else slow.rank
    phase = slow.phase if slow.rank == rank else ""
    text = f"{finding.code}: {_one_line(finding.message)}"
    return Verdict(text, finding.severity.label, rank, phase)


def _ending_verdict(rows: Sequence[RankRow], facts: VerdictFacts, worst: Finding | None) -> Verdict:
    """Describe the end of a run, and its faults."""
    status = facts.exit_status
    how = "" if facts.since_start is None else f" after {duration(facts.since_start)}"
    if status == 0:
        end = Verdict(f"the job succeeded{how}")
    elif facts.asked:
        end = Verdict(f"the job ended{how}, because it was asked to stop", "info")
    elif status is None:
        end = Verdict("the run is over; how it ended was not recorded", "warning")
    else:
        what = f"ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
        text = f"the job {'was ' if status < 0 else ''}{what}{how}"
        cause = next((row for row in rows if row.rank in facts.died[:1]), None)
        words = "" if cause is None else f"; rank {cause.rank}: {_one_line(cause.said)}"
        end = Verdict(text + words, "error", None if cause is None else cause.rank)
    if worst is None or worst.severity < Severity.WARNING:
        return end
    if end.level == "error" and worst.severity < Severity.ERROR:
        return end
    # The finding explains the rank's last output.
    found = _finding_verdict(worst, end)
    return replace(found, text=f"{end.text.partition('; ')[0]}; {found.text}")


# -- reasons why a live run does not train: ranks that do not run


def _dead(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
    if facts.asked:
        return Verdict("the job was asked to stop, and is ending", "info")
    dead = {row.rank: row for row in rows if row.state == "dead"}
    if not dead:
        return None
    first = dead[next((rank for rank in facts.died if rank in dead), next(iter(dead)))]
    more = f" (and {len(dead) - 1} more)" if len(dead) > 1 else ""
    return _verdict(f"rank {first.rank} died{more}: {first.said}", "error", first)


def _starting(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
    if any(row.state != "starting" for row in rows):
        return None
    if facts.held:
        verb = "waits" if len(facts.held) == 1 else "wait"
        who = named(facts.held)
        return Verdict(f"starting: {who} {verb} for a debugger (`ddpdoctor attach`)", "info")
    age = "" if facts.since_start is None else f", for {duration(facts.since_start)}"
    if not rows:
        return Verdict(f"starting: no rank has joined yet{age}", "info")
    of = f" of {facts.world_size}" if (facts.world_size or 0) > len(rows) else ""
    ranks = "rank has" if len(rows) == 1 and not of else "ranks have"
    return Verdict(f"starting: {len(rows)}{of} {ranks} joined, none trains yet{age}", "info")


def _debugged(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
    attached = [row for row in rows if row.state == "debugger"]
    if not attached:
        return None
    held = [row for row in attached if row.held] or attached
    what = f"{'are' if len(held) > 1 else 'is'} in the debugger"
    if len(held) == 1 and held[0].said:
        what = held[0].said
    others = held[0].held and any(
        row.state in ("running", "debugger") and not row.held for row in rows
    )
    waiting = f": the others wait for {'them' if len(held) > 1 else 'it'}" if others else ""
    return _verdict(f"{_named(held)} {what}{waiting}", "info", held[0])


_SAID_OF_SEVERAL = {
    "its process is stopped (SIGSTOP)": "their processes are stopped (SIGSTOP)",
    "its process is traced": "their processes are traced",
    "its process waits for a disk": "their processes wait for a disk",
}


def _stale(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
    stale = [row for row in rows if row.state == "stale"]
    if not stale:
        return None
    worst = max(stale, key=lambda row: row.heartbeat or 0.0)
    said = worst.said
    if len(stale) > 1:
        said = _SAID_OF_SEVERAL.get(said, "") if len({row.said for row in stale}) == 1 else ""
    why = f": {said}" if said else ""
    age = duration(worst.heartbeat or 0.0)
    return _verdict(f"no heartbeat from {_named(stale)} for {age}{why}", "error", worst)


# -- reasons why a live run does not train: ranks that wait


def _stuck(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
    """Find ranks that stay in a collective, and the rank they wait for."""
    waiting = _in_a_collective(rows, facts.usual)
    held = {row.rank for row in waiting}
    others = [row for row in rows if row.state in ("running", "starting") and row.rank not in held]
    if not waiting or len(rows) < 2 or len(others) > len(waiting):
        return None
    age = min(row.since or 0.0 for row in waiting)
    who = f"rank {waiting[0].rank} waits" if len(held) == 1 else f"{len(held)} ranks wait"
    if len(held) == len(rows):
        who = "both ranks wait" if len(rows) == 2 else f"all {len(rows)} ranks wait"
    what, same = _calls(waiting)
    text = f"{who} in {what} for {duration(age)}"
    if others:
        return _waited_for(text, others, age)
    left = [row for row in rows if row.state == "ended"]
    if left:
        verb = "have" if len(left) > 1 else "has"
        return _verdict(f"{text}; {_named(left)} {verb} already ended", "error", left[0])
    if not same:
        return _verdict(f"{who} for {duration(age)}, not in the same call: {what}", "error")
    return _verdict(text, "error" if age >= MIN_TROUBLE else "warning")


def _in_a_collective(rows: Sequence[RankRow], usual: Times | None) -> list[RankRow]:
    patience = MIN_STUCK_FIRST
    if usual is not None:
        patience = max(MIN_STUCK, MIN_STUCK_STEPS * usual.total)
    running = [row for row in rows if row.state == "running" and (row.since or 0) >= patience]
    return [row for row in running if row.phase in ("wait", "backward")]


def _calls(waiting: Sequence[RankRow]) -> tuple[str, bool]:
    """Name the calls that ranks wait in. Also return whether they are one call."""
    calls: dict[str, list[int]] = {}
    for row in waiting:
        phase = "the backward's all-reduce" if row.phase == "backward" else row.phase
        calls.setdefault(row.collective or phase, []).append(row.rank)
    if len(calls) == 1:
        return next(iter(calls)), True
    return ", ".join(f"{name} ({named(ranks)})" for name, ranks in calls.items()), False


def _waited_for(text: str, others: Sequence[RankRow], age: float) -> Verdict:
    last = max(others, key=lambda row: row.since or 0.0)
    where = ""
    if len(others) == 1:
        doing = f"is in {last.phase}{_site(last)}"
        where = f", which {'has not begun' if last.state == 'starting' else doing}"
    level = "warning" if age >= MIN_TROUBLE else "info"
    return _verdict(f"{text}, for {_named(others)}{where}", level, last)


def _quiet(rows: Sequence[RankRow], facts: VerdictFacts) -> Verdict | None:
    """Detect that no rank makes steps: validation, a checkpoint, or a hang on the GPU."""
    running = [row for row in rows if row.state == "running"]
    if facts.usual is None or not running:
        return None
    age = min(row.since or 0.0 for row in running)
    if age < max(MIN_STUCK_FIRST, 10 * facts.usual.total):
        return None
    phases = {row.phase for row in running}
    what = PHASE_NAMES["other"] if phases == {"other"} else ", ".join(sorted(phases))
    text = f"no step for {duration(age)}: the ranks are in {what}{_site(running[0])}"
    return _verdict(text, "info")


def _site(row: RankRow) -> str:
    return f" ({row.site.rpartition('/')[2]})" if row.site else ""


def _verdict(text: str, level: str, blamed: RankRow | None = None) -> Verdict:
    return Verdict(_one_line(text), level, None if blamed is None else blamed.rank)


def _named(rows: Sequence[RankRow]) -> str:
    return named(row.rank for row in rows)


def _one_line(text: str) -> str:
    return " ".join(text.split())
