"""What was reported of a live run, which findings still stand, and their full tracebacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddpdoctor.core import opening
from ddpdoctor.core.finding import RULES, Finding, Severity, explains
from ddpdoctor.core.relations import ABORT, MISPAIRED, fact
from ddpdoctor.core.user_code import Location
from ddpdoctor.run import rundir
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.supervisor import FindingRecord, FoundLocation, RetractionRecord

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run


# -- what was reported of a run while it went on, and what of that still holds


PATIENCE = 3
"""Examinations in a row that do not find it before a finding is withdrawn while the job runs."""

TURNS = 1
"""Times that a finding is withdrawn and reported again; then it waits for the job's end."""

Why = Literal["explained", "restated", "untrue", "over"]


@dataclass(frozen=True)
class Reported:
    """A finding, as it was reported.

    Attributes:
        number: Its place among all that was reported and withdrawn, from 1.
        finding: The finding.
        restart: The attempt of the job that it is about.
        step: How far the ranks of that attempt were, if that is known.
    """

    number: int
    finding: Finding
    restart: int
    step: int | None = None


@dataclass(frozen=True)
class Withdrawn:
    """A finding that was reported and holds no more.

    Attributes:
        number: Its place among all that was reported and withdrawn, from 1.
        reported: What was reported.
        why: ``explained`` by another finding, ``restated`` with another severity or other ranks,
            ``untrue`` after all, or true then and ``over``.
        reason: The same in words.
        by: The code that explains it; empty where none does.
    """

    number: int
    reported: Reported
    why: Why
    reason: str
    by: str = ""

    @property
    def verb(self) -> str:
        """``withdrawn``, or ``over`` for what was true."""
        return "over" if self.why == "over" else "withdrawn"


Event = Reported | Withdrawn


@dataclass
class _Entry:
    reported: Reported
    now: Finding
    """The same as it was found last."""
    missing: int = 0


class FindingLog:
    """Compares each examination with what was reported before.

    Of what it returns, all that was reported less all that was withdrawn is :attr:`current`. What
    comes and goes from one examination to the next makes no noise: a finding is withdrawn when it
    is missing for a while, or at once if another one explains it or takes its place; and once
    only, until the job has ended. What is known of an attempt that was followed by another one
    stays as it is.
    """

    def __init__(self) -> None:
        self._entries: dict[object, _Entry] = {}
        self._turns: Counter[object] = Counter()
        self._number = 0

    @property
    def current(self) -> list[Finding]:
        """What was reported and not withdrawn, the worst first."""
        return _worst_first(entry.now for entry in self._entries.values())

    def take(self, found: Sequence[Finding], run: Run, unread: Collection[str] = ()) -> list[Event]:
        """Take in what an examination found, and return what is to be reported of it.

        Args:
            found: The findings.
            run: What they were found in.
            unread: Codes of rules that could not read it; their findings stay as they are.
        """
        there: dict[object, Finding] = {finding.identity: finding for finding in found}
        lacking: list[tuple[object, _Entry]] = []
        for identity, entry in self._entries.items():
            now = there.pop(identity, None)
            if now is not None and now.severity == entry.reported.finding.severity:
                entry.now, entry.missing = now, 0
                continue
            if now is not None:
                there[identity] = now
            lacking.append((identity, entry))
        gone = []
        for identity, entry in lacking:
            # One that has more ranks now, or fewer, is nothing new.
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
                # As it was reported: not twice at one time.
                there.pop(identity, None)
                continue
            del self._entries[identity]
            self._turns[identity] += 1
            self._number += 1
            events.append(Withdrawn(self._number, entry.reported, *verdict))
        for identity, finding in there.items():
            self._number += 1
            # The next attempt may have begun before this one's failure is seen, or restated.
            restart = run.restarts[-1] if finding.restart is None else finding.restart
            reported = Reported(self._number, finding, restart, run.reached(restart))
            self._entries[identity] = _Entry(reported, finding)
            events.append(reported)
        return events

    def _verdict(
        self,
        identity: object,
        entry: _Entry,
        found: Sequence[Finding],
        new: Mapping[object, Finding],
        run: Run,
    ) -> tuple[Why, str, str] | None:
        """Why a reported finding is not found any more; None if it holds for now."""
        final = run.exit_status is not None
        if self._turns[identity] >= TURNS and not final:
            return None
        entry.missing += 1
        again = new.get(identity)
        if again is not None:
            weight = f"restated below, as {_A[again.severity.label]}"
            settled = final or again.severity > entry.now.severity or entry.missing >= PATIENCE
            return ("restated", weight, again.code) if settled else None
        if entry.reported.restart != run.restarts[-1]:
            return None
        better = _explanation(entry.now, found, new)
        if better is not None:
            return better
        rule = RULES.get(entry.now.code)
        lapsed = (rule.lapses if rule is not None else fact)(entry.now, run)
        if lapsed is None or (entry.missing < PATIENCE and not final and not lapsed.sure):
            return None
        return lapsed.why, lapsed.reason, ""


def _explanation(
    before: Finding, found: Sequence[Finding], new: Mapping[object, Finding]
) -> tuple[Why, str, str] | None:
    """The finding that explains an earlier one, or says the same better."""
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


_A = {"info": "an info", "warning": "a warning", "error": "an error"}


def _continues(before: Finding, now: Finding) -> bool:
    """Whether it is the same finding with more ranks, or fewer."""
    return before.severity == now.severity and before.about == now.about and _alike(before, now)


def _alike(one: Finding, other: Finding) -> bool:
    """Whether two findings have one code and place, and no other ranks, but perhaps more."""
    here, there = set(one.ranks), set(other.ranks)
    nested = here <= there or there <= here
    return (one.code, one.location) == (other.code, other.location) and (
        nested and bool(here) == bool(there)
    )


def _replaces(now: Finding, before: Finding) -> bool:
    """Whether a new finding takes the place of an older one."""
    if (now.subjects & before.subjects) - {MISPAIRED, ABORT}:
        return True
    shared = set(now.ranks) & set(before.ranks) or now.location == before.location
    return now.code == before.code and not now.about and not before.about and bool(shared)


def in_words(withdrawn: Withdrawn) -> str:
    """``withdrawn DDP701 (rank 1): explained by DDP302 below``."""
    finding = withdrawn.reported.finding
    ranks = finding.ranks
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    who = f" (rank{'s' if len(ranks) > 1 else ''} {shown})" if ranks else ""
    return f"{withdrawn.verb} {finding.code}{who}: {withdrawn.reason}"


# -- as records


def to_journal(event: Event, time: int) -> FindingRecord | RetractionRecord:
    """The record of an event at ``time`` (Unix nanoseconds)."""
    if isinstance(event, Reported):
        finding, at = event.finding, event.finding.location
        return FindingRecord(
            time=time,
            restart=event.restart,
            number=event.number,
            step=event.step,
            code=finding.code,
            severity=finding.severity.label,
            message=finding.message,
            ranks=finding.ranks,
            location=None if at is None else FoundLocation(path=at.path, line=at.line),
            evidence=finding.evidence,
            fix=finding.fix,
            paste=finding.paste,
        )
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
    """The finding that a record holds; None if it is damaged."""
    if not record.code or record.severity.upper() not in Severity.__members__:
        return None
    at = record.location
    return Finding(
        code=record.code,
        severity=Severity[record.severity.upper()],
        message=record.message,
        ranks=record.ranks,
        location=None if at is None else Location(at.path, at.line),
        evidence=record.evidence,
        fix=record.fix,
        paste=record.paste,
        restart=record.restart,
    )


def standing(records: Iterable[Record]) -> Iterable[tuple[Finding, int]]:
    """What a supervisor's records report and do not withdraw, each with its attempt."""
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
    """What was reported of a run and holds although no rule finds it again in its records."""
    for finding, restart in standing(run.supervisor):
        rule = RULES.get(finding.code)
        if rule is None:
            continue
        if restart != run.restarts[-1] or rule.lapses(finding, run) is None:
            yield finding


def with_kept(found: Sequence[Finding], run: Run) -> list[Finding]:
    """The findings of an examination, and those that were reported before and hold all the same."""
    more = [
        each
        for each in kept(run)
        if not any(_alike(one, each) or explains(one, each) for one in found)
    ]
    return _worst_first((*found, *more))


def _worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda each: (-each.severity, each.code, each.ranks))


# -- the whole text of a finding's traceback, kept in the run directory for who wants all of it


def keep_traceback(run: Run, finding: Finding) -> Path | None:
    """Write it down; where it is now, or None if there is none, or the disk says no."""
    path = traceback_path(run, finding)
    if path is None:
        return None
    try:
        rundir.put(path, _traceback_text(finding))
    except OSError:
        return None
    return path


def kept_traceback(run: Run, finding: Finding) -> Path | None:
    """Where it was written during the run; None if it was not, or another one took its place."""
    path = traceback_path(run, finding)
    try:
        text = _traceback_text(finding)
        same = path is not None and opening.contents(path, len(text)) == text
    except OSError:
        return None
    return path if same else None


def traceback_path(run: Run, finding: Finding) -> Path | None:
    """The file of a finding, if it has a traceback."""
    if not finding.traceback.strip():
        return None
    rank = f"-rank-{finding.ranks[0]:04d}" if finding.ranks else ""
    return run.path / f"traceback-{finding.code}{rank}.txt"


def _traceback_text(finding: Finding) -> bytes:
    return f"{finding.traceback.rstrip()}\n".encode("utf-8", "replace")
