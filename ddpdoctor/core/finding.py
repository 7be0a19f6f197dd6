"""Findings, and the registry of the rules that make them."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from ddpdoctor.core.relations import Lapse, Same, fact
from ddpdoctor.core.user_code import Location

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run


class Severity(IntEnum):
    """How much a finding matters; comparable, the worst is the greatest."""

    INFO = 1
    WARNING = 2
    ERROR = 3

    @property
    def label(self) -> str:
        """The severity as it is printed and written to JSON."""
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """One fault, said once.

    Attributes:
        code: The rule's code, such as ``DDP610``; its meaning never changes.
        severity: See :class:`Severity`.
        message: One sentence: the ranks, the cause and where.
        ranks: The guilty ranks, ascending; empty when it is the job as a whole.
        location: The guilty line, if one is known.
        evidence: The facts behind the message, one a line, numbers with units.
        fix: What to change, in one or two sentences.
        traceback: The user's part of a traceback or stack, if there is one.
        about: What makes it the same finding when ranks or lines shift while the job runs; empty
            where the ranks and the line do.
        paste: A line to type that does what the fix says, if there is one.
        subjects: What it is about, in words that related rules share
            (:func:`ddpdoctor.core.relations.same_subject`).
        moment: When it happened, in Unix nanoseconds; 0 if it has not yet, or is not known.
        restart: The attempt that it is about, from 0. A rule that leaves it out means the last one,
            which `examine` fills in. None where there are no attempts, as in a log.
    """

    code: str
    severity: Severity
    message: str
    ranks: tuple[int, ...] = ()
    location: Location | None = None
    evidence: tuple[str, ...] = ()
    fix: str = ""
    traceback: str = ""
    about: str = ""
    paste: str = ""
    subjects: frozenset[str] = frozenset()
    moment: int = 0
    restart: int | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for two sightings of the same fault, so that it is printed once."""
        return (self.code, self.about) if self.about else (self.code, self.ranks, self.location)

    @property
    def id(self) -> str:
        """A short hash of code, ranks, location and attempt.

        The same fault has the same id while the job runs, in a report, and in a copy of the run.
        """
        path, line = self.location or (None, None)
        facts = json.dumps([self.code, list(self.ranks), path, line, self.restart])
        return hashlib.sha256(facts.encode()).hexdigest()[:16]


def to_record(finding: Finding) -> dict[str, Any]:
    """A finding in the words of JSON; identity and traceback are not among them.

    ``paste`` is there only when there is such a line.
    """
    location = finding.location
    record: dict[str, Any] = {
        "id": finding.id,
        "code": finding.code,
        "severity": finding.severity.label,
        "message": finding.message,
        "ranks": list(finding.ranks),
        "location": None if location is None else {"path": location.path, "line": location.line},
        "evidence": list(finding.evidence),
        "fix": finding.fix,
        "restart": finding.restart,
    }
    if finding.paste:
        record["paste"] = finding.paste
    return record


def from_record(record: Mapping[str, Any]) -> Finding | None:
    """The finding that :func:`to_record` made this of; None if it is none, or damaged."""
    try:
        location = record.get("location")
        restart = record.get("restart")
        return Finding(
            code=str(record["code"]),
            severity=Severity[str(record["severity"]).upper()],
            message=str(record["message"]),
            ranks=tuple(int(rank) for rank in record.get("ranks") or ()),
            location=None
            if location is None
            else Location(str(location["path"]), int(location["line"])),
            evidence=tuple(str(fact) for fact in record.get("evidence") or ()),
            fix=str(record.get("fix") or ""),
            paste=str(record.get("paste") or ""),
            restart=None if restart is None else int(restart),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


Detect = Callable[["Run"], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A pure function from a run to findings, with its code, its page and its relations.

    Attributes:
        supersedes: The rules whose findings are consequences of this one's, by code, and when they
            are: where both are about the same fault.
        yields_to: The same from the other side, where this rule is the one that knows.
        lapses: What becomes of its findings once they are not found any more.
    """

    code: str
    name: str
    severity: Severity
    detect: Detect
    text: str = ""
    """The page of a rule that is a row of a table; empty where the function's docstring is."""
    supersedes: Mapping[str, Same] = field(default_factory=dict)
    yields_to: Mapping[str, Same] = field(default_factory=dict)
    lapses: Lapse = fact

    @property
    def page(self) -> str:
        """The documentation page."""
        return self.text or inspect.getdoc(self.detect) or ""

    @property
    def summary(self) -> str:
        """The page's first line."""
        return self.page.partition("\n")[0]


RULES: dict[str, Rule] = {}
"""All registered rules by code; ``ddpdoctor.diagnose.all_rules`` fills it when imported."""


def rule(
    code: str,
    name: str,
    severity: Severity,
    *,
    supersedes: Mapping[str, Same] | None = None,
    yields_to: Mapping[str, Same] | None = None,
    lapses: Lapse = fact,
) -> Callable[[Detect], Detect]:
    """Register a rule. ``severity`` is its usual one; a finding may carry a milder one.

    Raises:
        ValueError: The code is taken.
    """

    def register(detect: Detect) -> Detect:
        if code in RULES:
            raise ValueError(f"{code} is registered twice")
        RULES[code] = Rule(
            code,
            name,
            severity,
            detect,
            supersedes=supersedes or {},
            yields_to=yields_to or {},
            lapses=lapses,
        )
        return detect

    return register


def explains(cause: Finding, effect: Finding) -> bool:
    """Whether a finding is only the consequence of another one, by the relation of their rules."""
    of_cause, of_effect = RULES.get(cause.code), RULES.get(effect.code)
    same = of_cause.supersedes.get(effect.code) if of_cause is not None else None
    if same is not None and same(cause, effect):
        return True
    same = of_effect.yields_to.get(cause.code) if of_effect is not None else None
    return same is not None and same(cause, effect)


def examine(
    run: Run,
    rules: Iterable[Rule],
    *,
    failed: Callable[[Rule, Exception], None] | None = None,
) -> list[Finding]:
    """All findings of a run, the worst first, each identity once, without mere consequences.

    Of attempts that ended alike the last one counts. The relations between the rules say what is a
    consequence, after all rules have run. What follows from a consequence is one, too.

    Args:
        run: The snapshot.
        rules: What to look for.
        failed: Called with a rule that cannot read the run; without it its exception is raised.
    """
    found: dict[object, Finding] = {}
    for each in rules:
        try:
            for finding in each.detect(run):
                known = found.get(finding.identity)
                if known is None or (known.restart or 0) < (finding.restart or 0):
                    found[finding.identity] = finding
        except Exception as error:
            if failed is None:
                raise
            failed(each, error)
    causes = [
        effect if effect.restart is not None else replace(effect, restart=run.restarts[-1])
        for effect in found.values()
        if not any(explains(cause, effect) for cause in found.values())
    ]
    return sorted(causes, key=lambda f: (-f.severity, f.code, f.ranks))
