"""Findings, and the registry of the rules that make them."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, TypeVar

from ddpdoctor.core.relations import Lapse, Same, fact, same_subject
from ddpdoctor.core.user_code import Location


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
    """One fault, reported once.

    Attributes:
        code: The rule's code, such as ``DDP610``. Its meaning never changes.
        severity: See :class:`Severity`.
        message: One sentence: the ranks, the cause and the place.
        ranks: The blamed ranks, ascending. Empty if the whole job is to blame.
        location: The line to blame, if known.
        evidence: The facts behind the message, one per line, numbers with units.
        fix: What to change, in one or two sentences.
        traceback: The user's part of a traceback or stack, if any.
        about: Identifies the finding although its ranks or lines change while the job runs. Empty
            if ranks and line identify it.
        paste: A command that applies the fix, if any.
        nodes: The host names of the nodes on which its fix is applied, where there are several.
        subjects: Topics that related rules share (:func:`ddpdoctor.core.relations.same_subject`).
        moment: When it happened, in Unix nanoseconds. 0 if it has not yet, or if not known.
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
    nodes: tuple[str, ...] = ()
    subjects: frozenset[str] = frozenset()
    moment: int = 0
    restart: int | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for two findings of the same fault, which is printed once."""
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
    """Return a finding as a JSON object, without its identity and traceback.

    ``paste`` and ``nodes`` are left out if they are empty.
    """
    location = finding.location
    record: dict[str, Any] = {
        "id": finding.id,
        "code": finding.code,
        "severity": finding.severity.label,
        "message": finding.message,
        "ranks": list(finding.ranks),
        "location": None if location is None else location._asdict(),
        "evidence": list(finding.evidence),
        "fix": finding.fix,
        "restart": finding.restart,
    }
    if finding.paste:
        record["paste"] = finding.paste
    if finding.nodes:
        record["nodes"] = list(finding.nodes)
    return record


def from_record(record: Mapping[str, Any]) -> Finding | None:
    """Return the finding of a JSON object that :func:`to_record` made. None if it is damaged."""
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
            nodes=tuple(str(host) for host in record.get("nodes") or ()),
            restart=None if restart is None else int(restart),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


# -- Rules


Detect = Callable[[Any], Iterator[Finding]]
"""Finds faults in a :class:`ddpdoctor.run.snapshot.Run`, which this layer does not know."""


@dataclass(frozen=True)
class Rule:
    """A pure function from a run to findings, with a code, its page and its relations."""

    code: str
    name: str
    severity: Severity
    detect: Detect  # May serve several rules. Then it yields the findings of all of them.
    page: str = ""  # The documentation page
    supersedes: Mapping[str, Same] = field(default_factory=dict)
    """The rules whose findings are consequences of this one's, by code, with the predicate that has
    to hold."""
    yields_to: Mapping[str, Same] = field(default_factory=dict)
    """The same from the other side: rules of whose findings this one's are consequences."""
    lapses: Lapse = fact  # Decides about a finding that is no longer found
    twice: bool = False
    """In a running job two examinations in a row have to find it, since the records of its cause
    may come after those that show it."""
    late: bool = False
    """Finds its fault in what was seen since, where the probe started while the job ran. Other
    rules conclude from how it began, and do not judge such a run."""
    beside: Detect | None = None
    """A second function with findings of this code. They count where the first has none about the
    same subject."""

    @property
    def summary(self) -> str:
        """The page's first line."""
        return self.page.partition("\n")[0]


RULES: dict[str, Rule] = {}
"""All rules by code. Importing ``ddpdoctor.diagnose.all_rules`` registers them."""


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
    twice: bool = False,
    late: bool = False,
) -> Callable[[Page], Page]:
    """Register a rule, whose page is the docstring of what is decorated.

    The arguments are the fields of :class:`Rule`. Some findings may carry a milder severity.
    Without ``detect``, the decorated function finds the faults.

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
            twice,
            late,
        )
        return page

    return decorate


def explains(cause: Finding, effect: Finding) -> bool:
    """Return whether the relations of two rules make one finding a consequence of the other."""
    of_cause, of_effect = RULES.get(cause.code), RULES.get(effect.code)
    declared = (
        of_cause.supersedes.get(effect.code) if of_cause is not None else None,
        of_effect.yields_to.get(cause.code) if of_effect is not None else None,
    )
    return any(same is not None and same(cause, effect) for same in declared)


def examine(
    run: Any, rules: Iterable[Rule], *, failed: Callable[[Rule, Exception], None] | None = None
) -> list[Finding]:
    """Return all findings of a run without mere consequences, the worst first.

    Equal findings of several attempts are reported for the last one. All rules run before their
    relations are applied, so a consequence of a consequence is left out as well.
    ``failed`` is called if a rule raises an exception. If missing, the exception is passed on.
    """
    said: dict[object, Finding] = {}
    judging = {each.code: each for each in rules if each.late or not run.late}
    for finding in _detected(run, judging, failed):
        known = said.get(finding.identity)
        if known is None or (known.restart or 0) < (finding.restart or 0):
            said[finding.identity] = finding
    return worst_first(
        effect if effect.restart is not None else replace(effect, restart=run.restarts[-1])
        for effect in said.values()
        if not any(explains(cause, effect) for cause in said.values())
    )


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity, code and ranks."""
    return sorted(findings, key=lambda each: (-each.severity, each.code, each.ranks))


def _detected(
    run: Any, rules: Mapping[str, Rule], failed: Callable[[Rule, Exception], None] | None
) -> list[Finding]:
    """Return the findings of some rules. A function that several rules share is called once."""
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
