"""The findings reported about a live run: which still hold, and their full tracebacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddpdoctor.core import opening
from ddpdoctor.core.finding import RULES, Finding, explains, from_record, to_record, worst_first
from ddpdoctor.core.relations import ABORT, MISPAIRED, STANDSTILL, Lapsed, ended_by, fact
from ddpdoctor.run import rundir
from ddpdoctor.run.records.base import Record, as_json
from ddpdoctor.run.records.supervisor import FindingRecord, RetractionRecord
from ddpdoctor.run.records.typed_json import decoder

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run


MAX_MISSING = 3  # Number of examinations in a row without a finding before it is withdrawn
MAX_WITHDRAWALS = 1  # Number of withdrawals of a finding before a new one waits for the job's end

Why = Literal["explained", "restated", "untrue", "over"]


@dataclass(frozen=True)
class Reported:
    """A finding as it was reported."""

    number: int  # Its number among all reports and withdrawals, from 1
    finding: Finding  # The finding
    restart: int  # The attempt of the job that it is about
    step: int | None = None  # The step that the ranks of that attempt had reached, if known


@dataclass(frozen=True)
class Withdrawn:
    """A finding that was reported and no longer holds."""

    number: int  # Its number among all reports and withdrawals, from 1
    reported: Reported  # The report
    why: Why
    """``explained`` by another finding, ``restated`` with another severity or other ranks,
    ``untrue``, or true at the time but ``over``."""
    reason: str  # The same in words
    by: str = ""  # The code of the finding that explains it, if any

    @property
    def verb(self) -> str:
        """``withdrawn``, or ``over`` if the finding was true."""
        return "over" if self.why == "over" else "withdrawn"


Event = Reported | Withdrawn


@dataclass
class _Entry:
    reported: Reported
    now: Finding  # The finding as made by the latest examination
    missing: int = 0


class FindingLog:
    """Compares each examination with the earlier reports.

    All reports minus all withdrawals are :attr:`current`. A finding that comes and goes is not
    reported each time: it is withdrawn once it is missing for a while, or at once if another
    finding explains or replaces it. It is withdrawn only once until the job has ended. Findings
    about an attempt that was followed by another one are never withdrawn.
    """

    def __init__(self) -> None:
        self._entries: dict[object, _Entry] = {}
        self._once: set[object] = set()  # New findings that the next examination has to confirm
        self._turns: Counter[object] = Counter()
        self._number = 0

    @property
    def current(self) -> list[Finding]:
        """The findings that still hold, the worst first."""
        return worst_first(entry.now for entry in self._entries.values())

    def take(self, found: Sequence[Finding], run: Run, unread: Collection[str] = ()) -> list[Event]:
        """Compare an examination with the reports so far, and return the resulting events.

        ``unread`` are the codes of rules that failed. Their findings stay as they are.
        """
        there: dict[object, Finding] = {finding.identity: finding for finding in found}
        self._wait_for_another(there, run)
        lacking: list[tuple[object, _Entry]] = []
        for identity, entry in self._entries.items():
            now = there.get(identity)
            if now is not None and now.severity == entry.reported.finding.severity:
                del there[identity]
                entry.now, entry.missing = now, 0
            else:
                lacking.append((identity, entry))
        gone = []
        for identity, entry in lacking:
            # A finding with more or fewer ranks is not new.
            same = next((each for each in there.values() if _continues(entry.now, each)), None)
            if same is not None and identity not in there:
                del there[same.identity]
                entry.now, entry.missing = same, 0
            elif entry.reported.finding.code not in unread:
                gone.append((identity, entry))
        events: list[Event] = []
        for identity, entry in gone:
            verdict = self._verdict(identity, entry, found, there, run)
            if verdict is None:
                # The earlier report still holds, so its new form is not reported as well.
                there.pop(identity, None)
                continue
            del self._entries[identity]
            self._turns[identity] += 1
            self._number += 1
            events.append(Withdrawn(self._number, entry.reported, *verdict))
        for identity, finding in there.items():
            self._number += 1
            # The next attempt may have begun before a failure is found or restated.
            restart = run.restarts[-1] if finding.restart is None else finding.restart
            reported = Reported(self._number, finding, restart, run.reached(restart))
            self._entries[identity] = _Entry(reported, finding)
            events.append(reported)
        return events

    def _wait_for_another(self, there: dict[object, Finding], run: Run) -> None:
        """Leave out new findings that the next examination has to confirm."""
        new = {
            identity
            for identity, finding in there.items()
            if identity not in self._entries and run.exit_status is None and _needs_two(finding)
        }
        for identity in new - self._once:
            del there[identity]
        self._once = new

    def _verdict(
        self,
        identity: object,
        entry: _Entry,
        found: Sequence[Finding],
        new: Mapping[object, Finding],
        run: Run,
    ) -> tuple[Why, str, str] | None:
        """Return why a reported finding no longer holds, or None if it is kept for now."""
        final = run.exit_status is not None
        if self._turns[identity] >= MAX_WITHDRAWALS and not final:
            return None
        entry.missing += 1
        again = new.get(identity)
        if again is not None:
            label = again.severity.label
            reason = f"restated below, as a{'' if label == 'warning' else 'n'} {label}"
            settled = final or again.severity > entry.now.severity or entry.missing >= MAX_MISSING
            return ("restated", reason, again.code) if settled else None
        if entry.reported.restart != run.restarts[-1]:
            return None
        better = _explanation(entry.now, found, new)
        if better is not None:
            return better
        rule = RULES.get(entry.now.code)
        lapsed = (rule.lapses if rule is not None else fact)(entry.now, run)
        if lapsed is None or (entry.missing < MAX_MISSING and not final and not lapsed.sure):
            return None
        return lapsed.why, lapsed.reason, ""


def _needs_two(finding: Finding) -> bool:
    rule = RULES.get(finding.code)
    return rule is not None and rule.twice


def _explanation(
    before: Finding, found: Sequence[Finding], new: Mapping[object, Finding]
) -> tuple[Why, str, str] | None:
    """Find the finding that explains an earlier one, or replaces it."""
    cause = next((each for each in found if explains(each, before)), None)
    if cause is not None:
        where = "below" if cause.identity in new else "above"
        return "explained", f"explained by {cause.code} {where}", cause.code
    other = next((each for each in new.values() if _replaces(each, before)), None)
    if other is not None and other.code == before.code:
        return "restated", "restated below", other.code
    if other is not None:
        return "explained", f"explained by {other.code} below", other.code
    return None


def _continues(before: Finding, now: Finding) -> bool:
    """Return whether it is the same finding with more or fewer ranks."""
    return before.severity == now.severity and before.about == now.about and _alike(before, now)


def _alike(one: Finding, other: Finding) -> bool:
    """Return whether code and line are equal, and the ranks of one include the other's."""
    here, there = set(one.ranks), set(other.ranks)
    nested = here <= there or there <= here
    return (one.code, one.location) == (other.code, other.location) and (
        nested and bool(here) == bool(there)
    )


def _replaces(now: Finding, before: Finding) -> bool:
    """Return whether a new finding takes the place of an older one."""
    if now.code == before.code and ended_by(now, before):
        # The end of a rank was seen before the calls that led to it.
        return True
    if (now.subjects & before.subjects) - {MISPAIRED, ABORT}:
        return True
    shared = set(now.ranks) & set(before.ranks) or now.location == before.location
    return now.code == before.code and not now.about and not before.about and bool(shared)


def in_words(withdrawn: Withdrawn) -> str:
    """Format a withdrawal: ``withdrawn DDP701 (rank 1): explained by DDP302 below``."""
    finding = withdrawn.reported.finding
    ranks = finding.ranks
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    who = f" (rank{'s' if len(ranks) > 1 else ''} {shown})" if ranks else ""
    return f"{withdrawn.verb} {finding.code}{who}: {withdrawn.reason}"


# -- When a finding about a hang lapses


def hang(finding: Finding, run: Run) -> Lapsed | None:
    """Lapse as untrue: the finding explains a hang."""
    if run.hang is None:
        return Lapsed("untrue", "the job went on", sure=True)
    return Lapsed("untrue", "a later examination does not show it")


def start(finding: Finding, run: Run) -> Lapsed | None:
    """Lapse as over once the job has continued: the finding explains why its start is delayed.

    Ranks that have moved show that as well. The job may hang again before the end of the first hang
    is noticed.
    """
    since = [
        rank.status.since
        for rank in run.last
        if rank.rank in finding.ranks and rank.status is not None
    ]
    moved = min(since, default=0) > finding.moment
    if run.hang is not None and not moved:
        return hang(finding, run)
    seconds = (max(run.went_on, default=0) - finding.moment) // 1_000_000_000
    after = f" {seconds} s later" if finding.moment and seconds > 0 else ""
    return Lapsed("over", f"the job went on{after}", sure=True)


def event(finding: Finding, run: Run) -> Lapsed | None:
    """Keep the finding although its evidence is gone, unless it is about a hang that ended."""
    return hang(finding, run) if STANDSTILL in finding.subjects else None


# -- As records of the supervisor's journal


def to_journal(event: Event, time: int) -> FindingRecord | RetractionRecord:
    """Make the record of an event at ``time`` (Unix nanoseconds)."""
    if isinstance(event, Reported):
        about = {
            "time": time, "restart": event.restart, "number": event.number, "step": event.step,
        }  # fmt: skip
        return decoder(FindingRecord)({**about, **to_record(event.finding)})
    return RetractionRecord(
        time=time,
        number=event.number,
        retracts=event.reported.number,
        code=event.reported.finding.code,
        ranks=event.reported.finding.ranks,
        why=event.why,
        by=event.by or None,
        reason=event.reason,
    )


def from_journal(record: FindingRecord) -> Finding | None:
    """Return the finding of a record, or None if it is damaged."""
    at = record.location
    location = None if at is None else as_json(at)
    return from_record({**as_json(record), "location": location}) if record.code else None


def standing(records: Iterable[Record]) -> Iterable[tuple[Finding, int]]:
    """Return the findings that hold according to a supervisor's records, with their attempts."""
    current: dict[int, tuple[Finding, int]] = {}
    for each in records:
        if isinstance(each, RetractionRecord):
            current.pop(each.retracts, None)
        elif isinstance(each, FindingRecord) and each.number is not None:
            finding = from_journal(each)
            if finding is not None:
                current[each.number] = finding, each.restart
    return current.values()


def kept(run: Run) -> Iterator[Finding]:
    """Yield the reports of a run that still hold, though no rule finds them in its records now."""
    for finding, restart in standing(run.supervisor):
        rule = RULES.get(finding.code)
        if rule is not None and (restart != run.restarts[-1] or rule.lapses(finding, run) is None):
            yield finding


def with_kept(found: Sequence[Finding], run: Run) -> list[Finding]:
    """Return the findings of an examination, and earlier reports that still hold."""
    more = [
        each
        for each in kept(run)
        if not any(_alike(one, each) or explains(one, each) for one in found)
    ]
    return worst_first((*found, *more))


# -- The full text of a finding's traceback, kept in the run directory


def keep_traceback(run: Run, finding: Finding) -> Path | None:
    """Write the traceback and return its file. None without one, or if the disk refuses it."""
    path = traceback_path(run, finding)
    if path is None:
        return None
    try:
        rundir.put(path, _traceback_text(finding))
    except OSError:
        return None
    return path


def kept_traceback(run: Run, finding: Finding) -> Path | None:
    """Return the file that was written during the run. None without one, or if it was replaced."""
    path = traceback_path(run, finding)
    try:
        text = _traceback_text(finding)
        same = path is not None and opening.contents(path, len(text)) == text
    except OSError:
        return None
    return path if same else None


def traceback_path(run: Run, finding: Finding) -> Path | None:
    """Return the file for a finding's traceback, or None if it has no traceback."""
    if not finding.traceback.strip():
        return None
    rank = f"-rank-{finding.ranks[0]:04d}" if finding.ranks else ""
    return run.path / f"traceback-{finding.code}{rank}.txt"


def _traceback_text(finding: Finding) -> bytes:
    return f"{finding.traceback.rstrip()}\n".encode("utf-8", "replace")
