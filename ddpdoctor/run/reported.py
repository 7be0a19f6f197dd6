"""What was said of a run while it went on, and what of that still stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpdoctor.core.finding import RULES, Finding, explains, from_record, to_record
from ddpdoctor.core.relations import ABORT, MISPAIRED, fact
from ddpdoctor.run.record import integer
from ddpdoctor.run.snapshot import Run

PATIENCE = 3
"""Examinations in a row that do not find it before a finding is withdrawn while the job runs."""

TURNS = 1
"""Times that one finding is withdrawn and said again; from then on it waits for the job's end."""

Why = Literal["explained", "restated", "untrue", "over"]


@dataclass(frozen=True)
class Told:
    """A finding, as it was said.

    Attributes:
        number: Its place among all that was said and withdrawn, from 1.
        finding: What was said.
        restart: In which attempt of the job.
    """

    number: int
    finding: Finding
    restart: int


@dataclass(frozen=True)
class Withdrawn:
    """Something that was said and stands no more.

    Attributes:
        number: Its place among all that was said and withdrawn, from 1.
        told: What was said.
        why: ``explained`` by another finding, ``restated`` with another severity or other ranks,
            ``untrue`` after all, or true then and ``over``.
        reason: The same in words.
        by: The code that explains it; empty where none does.
    """

    number: int
    told: Told
    why: Why
    reason: str
    by: str = ""

    @property
    def verb(self) -> str:
        """``withdrawn``, or ``over`` for what was true."""
        return "over" if self.why == "over" else "withdrawn"


Event = Told | Withdrawn


@dataclass
class _Entry:
    told: Told
    now: Finding
    """The same as it was found last."""
    missing: int = 0


class Said:
    """Compares each examination with what was said before.

    Of what it returns, all that was said less all that was withdrawn is :attr:`standing`. What
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
    def standing(self) -> list[Finding]:
        """What was said and not withdrawn, the worst first."""
        found = [entry.now for entry in self._entries.values()]
        return sorted(found, key=lambda f: (-f.severity, f.code, f.ranks))

    def take(self, found: Sequence[Finding], run: Run, unread: Collection[str] = ()) -> list[Event]:
        """Take in what an examination found, and return what is to be said of it.

        Args:
            found: The findings.
            run: What they were found in.
            unread: Codes of rules that could not read it; their findings stay as they are.
        """
        there: dict[object, Finding] = {finding.identity: finding for finding in found}
        lacking: list[tuple[object, _Entry]] = []
        for identity, entry in self._entries.items():
            now = there.pop(identity, None)
            if now is not None and now.severity == entry.told.finding.severity:
                entry.now, entry.missing = now, 0
                continue
            if now is not None:
                there[identity] = now
            lacking.append((identity, entry))
        gone = []
        for identity, entry in lacking:
            # Of one that has more ranks now, or fewer, nothing new is to be said.
            same = next((each for each in there.values() if _continues(entry.now, each)), None)
            if same is not None and identity not in there:
                del there[same.identity]
                entry.now, entry.missing = same, 0
            elif entry.told.finding.code not in unread:
                gone.append((identity, entry))
        events: list[Event] = []
        for identity, entry in gone:
            verdict = self._verdict(identity, entry, found, there, run)
            if verdict is None:
                # As it was said: not twice at one time.
                there.pop(identity, None)
                continue
            del self._entries[identity]
            self._turns[identity] += 1
            self._number += 1
            events.append(Withdrawn(self._number, entry.told, *verdict))
        for identity, finding in there.items():
            self._number += 1
            told = Told(self._number, finding, run.restarts[-1])
            self._entries[identity] = _Entry(told, finding)
            events.append(told)
        return events

    def _verdict(
        self,
        identity: object,
        entry: _Entry,
        found: Sequence[Finding],
        new: Mapping[object, Finding],
        run: Run,
    ) -> tuple[Why, str, str] | None:
        """Why something that was said is not found any more; None if it stands for now."""
        final = run.exit_status is not None
        if self._turns[identity] >= TURNS and not final:
            return None
        entry.missing += 1
        again = new.get(identity)
        if again is not None:
            weight = f"restated below, as {_A[again.severity.label]}"
            settled = final or again.severity > entry.now.severity or entry.missing >= PATIENCE
            return ("restated", weight, again.code) if settled else None
        if entry.told.restart != run.restarts[-1]:
            return None
        cause = next((each for each in found if explains(each, entry.now)), None)
        if cause is not None:
            where = "below" if cause.identity in new else "above"
            return "explained", f"explained by {cause.code} {where}", cause.code
        other = next((each for each in new.values() if _replaces(each, entry.now)), None)
        if other is not None and other.code == entry.now.code:
            return "restated", "restated below", other.code
        if other is not None:
            return "explained", f"explained by {other.code} below", other.code
        rule = RULES.get(entry.now.code)
        lapsed = (rule.lapses if rule is not None else fact)(entry.now, run)
        if lapsed is None or (entry.missing < PATIENCE and not final and not lapsed.sure):
            return None
        return lapsed.why, lapsed.reason, ""


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
    """Whether a new finding says better what another one said before."""
    if (now.subjects & before.subjects) - {MISPAIRED, ABORT}:
        return True
    shared = set(now.ranks) & set(before.ranks) or now.location == before.location
    return now.code == before.code and not now.about and not before.about and bool(shared)


def in_words(withdrawn: Withdrawn) -> str:
    """``withdrawn DDP701 (rank 1): explained by DDP302 below``."""
    finding = withdrawn.told.finding
    ranks = finding.ranks
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    who = f" (rank{'s' if len(ranks) > 1 else ''} {shown})" if ranks else ""
    return f"{withdrawn.verb} {finding.code}{who}: {withdrawn.reason}"


# -- as records


def record(event: Event) -> dict[str, Any]:
    """An event in the words of JSON: a finding, or what withdraws an earlier one."""
    if isinstance(event, Told):
        return to_record(event.finding)
    told = event.told
    return {
        "retracts": told.number,
        "code": told.finding.code,
        "ranks": list(told.finding.ranks),
        "why": event.why,
        "by": event.by or None,
        "reason": event.reason,
    }


def kept(run: Run) -> Iterator[Finding]:
    """What was said of a run and stands although no rule finds it again in its records."""
    told: dict[int, tuple[Finding, int]] = {}
    for each in run.supervisor:
        if each.get("kind") == "retraction":
            told.pop(integer(each, "retracts", -1), None)
        elif each.get("kind") == "finding":
            finding = from_record(each)
            if finding is not None and "number" in each:
                told[integer(each, "number")] = (finding, integer(each, "restart"))
    for finding, restart in told.values():
        rule = RULES.get(finding.code)
        if rule is None:
            continue
        if restart != run.restarts[-1] or rule.lapses(finding, run) is None:
            yield finding


def with_kept(found: Sequence[Finding], run: Run) -> list[Finding]:
    """The findings of an examination, and those that were said before and stand all the same."""
    more = [
        each
        for each in kept(run)
        if not any(_alike(one, each) or explains(one, each) for one in found)
    ]
    return sorted((*found, *more), key=lambda f: (-f.severity, f.code, f.ranks))
