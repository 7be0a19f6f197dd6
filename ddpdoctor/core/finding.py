"""Findings, and the registry of the rules that make them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.core.relations import Lapse, Same, fact, same_subject
from ddpdoctor.core.user_code import Location

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run


class Severity(IntEnum):
    """How much a finding matters. The worst is the greatest."""

    INFO = 1
    WARNING = 2
    ERROR = 3

    @property
    def label(self) -> str:
        """The severity as it is printed and written to JSON."""
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """One fault of a job.

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
        restart: The attempt that it is about; None for the last one of what was examined.
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
        """Equal for two findings of the same fault, so that it is printed once."""
        return (self.code, self.about) if self.about else (self.code, self.ranks, self.location)


def to_record(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON, without identity and traceback.

    ``paste`` is there only if there is such a line.
    """
    location = finding.location
    record: dict[str, Any] = {
        "code": finding.code,
        "severity": finding.severity.label,
        "message": finding.message,
        "ranks": list(finding.ranks),
        "location": None if location is None else {"path": location.path, "line": location.line},
        "evidence": list(finding.evidence),
        "fix": finding.fix,
    }
    if finding.paste:
        record["paste"] = finding.paste
    return record


def from_record(record: Mapping[str, Any]) -> Finding | None:
    """Return the finding that :func:`to_record` made this of; None if it is damaged."""
    try:
        location = record.get("location")
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
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


Detect = Callable[["Run"], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A pure function from a run to findings, with a code, its page and its relations.

    Attributes:
        detect: It may serve several rules. It yields the findings of all of them then.
        page: The documentation page.
        supersedes: The rules whose findings are consequences of this one's, by code, and when they
            are: where both are about the same fault.
        yields_to: The same from the other side, where this rule is the one that knows.
        lapses: What becomes of its findings once they are not found any more.
        beside: A second function with findings of this code. They count where the first has none
            about the same subject.
    """

    code: str
    name: str
    severity: Severity
    detect: Detect
    page: str = ""
    supersedes: Mapping[str, Same] = field(default_factory=dict)
    yields_to: Mapping[str, Same] = field(default_factory=dict)
    lapses: Lapse = fact
    beside: Detect | None = None

    @property
    def summary(self) -> str:
        """The page's first line."""
        return self.page.partition("\n")[0]


RULES: dict[str, Rule] = {}
"""All registered rules by code; ``ddpdoctor.diagnose.all_rules`` fills it when imported."""


Page = TypeVar("Page", bound=Callable[..., Any])
"""A function or a class whose docstring is the page of a rule."""


def rule(
    code: str,
    name: str,
    severity: Severity,
    *,
    detect: Detect | None = None,
    supersedes: Mapping[str, Same] | None = None,
    yields_to: Mapping[str, Same] | None = None,
    lapses: Lapse = fact,
) -> Callable[[Page], Page]:
    """Register a rule, whose page is the docstring of what is decorated.

    Args:
        code: The code of its findings.
        name: A name for it.
        severity: The usual severity of its findings. Some may carry a milder one.
        detect: A function that serves several rules. Without it, the decorated function.
        supersedes: See :class:`Rule`.
        yields_to: See :class:`Rule`.
        lapses: See :class:`Rule`.

    Raises:
        ValueError: The code is taken.
    """

    def decorate(page: Page) -> Page:
        if code in RULES:
            raise ValueError(f"{code} is registered twice")
        RULES[code] = Rule(
            code,
            name,
            severity,
            detect or page,
            inspect.getdoc(page) or "",
            supersedes or {},
            yields_to or {},
            lapses,
        )
        return page

    return decorate


def explains(cause: Finding, effect: Finding) -> bool:
    """Return whether a finding is only the consequence of another one, by their rules."""
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
    """Return the findings of a run, the worst first, each identity once, without consequences.

    Of attempts that ended alike the last one counts. After all rules have run, their relations say
    what is a consequence. The consequence of a consequence is left out, too.

    Args:
        run: The snapshot.
        rules: The rules to run.
        failed: Called with a rule that cannot read the run; without it its exception is raised.
    """
    said: dict[object, Finding] = {}
    for finding in _detected(run, {each.code: each for each in rules}, failed):
        known = said.get(finding.identity)
        if known is None or (known.restart or 0) < (finding.restart or 0):
            said[finding.identity] = finding
    causes = [
        effect
        for effect in said.values()
        if not any(explains(cause, effect) for cause in said.values())
    ]
    return sorted(causes, key=lambda f: (-f.severity, f.code, f.ranks))


def _detected(
    run: Run, rules: Mapping[str, Rule], failed: Callable[[Rule, Exception], None] | None
) -> list[Finding]:
    """Return the findings of some rules, by code. A function that serves several runs once."""
    detects = [detect for each in rules.values() for detect in (each.detect, each.beside)]
    found: list[Finding] = []
    beside: list[Finding] = []
    for detect in dict.fromkeys(each for each in detects if each is not None):
        try:
            for finding in detect(run):
                rule = rules.get(finding.code)
                if rule is not None:
                    (found if rule.detect == detect else beside).append(finding)
        except Exception as error:
            if failed is None:
                raise
            for rule in rules.values():
                if detect in (rule.detect, rule.beside):
                    failed(rule, error)
    said = [(each.code, each) for each in found]
    found += [
        each
        for each in beside
        if not any(code == each.code and same_subject(one, each) for code, one in said)
    ]
    return found
