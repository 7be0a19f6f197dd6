"""What ddpdoctor says: findings, and the registry of the rules that make them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.run import Run


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
class Location:
    """A line of the user's code."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


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

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for two sightings of the same fault, so that it is printed once."""
        return (self.code, self.about) if self.about else (self.code, self.ranks, self.location)


Detect = Callable[["Run"], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A pure function from a run to findings, with its code and its page."""

    code: str
    name: str
    severity: Severity
    detect: Detect

    @property
    def page(self) -> str:
        """The documentation page: the function's docstring."""
        return inspect.getdoc(self.detect) or ""

    @property
    def summary(self) -> str:
        """The page's first line."""
        return self.page.partition("\n")[0]


RULES: dict[str, Rule] = {}
"""All registered rules by code; ``ddpdoctor.rules`` fills it when imported."""


def rule(code: str, name: str, severity: Severity) -> Callable[[Detect], Detect]:
    """Register a rule. ``severity`` is its usual one; a finding may carry a milder one.

    Raises:
        ValueError: The code is taken.
    """

    def register(detect: Detect) -> Detect:
        if code in RULES:
            raise ValueError(f"{code} is registered twice")
        RULES[code] = Rule(code, name, severity, detect)
        return detect

    return register


def examine(run: Run, rules: Iterable[Rule]) -> list[Finding]:
    """All findings of a run, the worst first, each identity once."""
    found: dict[object, Finding] = {}
    for each in rules:
        for finding in each.detect(run):
            found.setdefault(finding.identity, finding)
    return sorted(found.values(), key=lambda f: (-f.severity, f.code, f.ranks))
