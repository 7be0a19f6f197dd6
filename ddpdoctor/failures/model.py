"""What the table of known failures is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from textwrap import indent

from ddpdoctor.core.finding import Severity

_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")


class Weight(IntEnum):
    """How much a printed line explains; the verdict is the earliest of the heaviest."""

    NOTE = 1
    """Worth knowing, and no failure."""
    WRAPPER = 2
    """A launcher says that a rank failed."""
    CONSEQUENCE = 3
    """A rank lost a peer: never the verdict where a cause is seen."""
    SYMPTOM = 4
    """Nobody came, or nobody answered: the verdict only where no rank has a cause of its own."""
    GENERIC = 5
    """A cause whose nature another line tells, if one does."""
    CAUSE = 6


@dataclass(frozen=True)
class Page:
    """The documentation of a code, in the sections that every rule's page has."""

    summary: str
    finds: str
    why: str
    fix: str
    example: str
    silent: str

    def __str__(self) -> str:
        sections = (
            ("What it finds", self.finds),
            ("Why it is bad", self.why),
            ("How to fix it", self.fix),
            ("Example", self.example),
            ("When it stays silent", self.silent),
        )
        bodies = (f"{head}\n{indent(text, '    ')}" for head, text in sections)
        return "\n\n".join([self.summary, *bodies])


@dataclass(frozen=True)
class Failure:
    """A failure by the text that it prints.

    Attributes:
        code: The code of the fault, which may be that of a rule that sees it otherwise, too.
        name: Short name within the table.
        weight: See :class:`Weight`.
        anchors: Literals of which each text that ``pattern`` matches has one; the quick look.
        pattern: Regular expression, for a line or an exception's whole message. A group ``rank``
            is the guilty rank; all groups can stand in ``says``.
        says: What follows the subject of the sentence; a part in brackets is left out where one of
            its groups matched nothing.
        fix: What to change.
        within: Regular expression that the frames of an exception have to match besides.
        unless: Regular expression that they must not match: the same words of other libraries.
        page: The code's page; None where a rule has it, or an earlier entry of that code.
        likely: The text alone does not prove it.
        severity: Of its finding.
        torch: Where it was seen printed: versions of torch, or other.
    """

    code: str
    name: str
    weight: Weight
    anchors: tuple[str, ...]
    pattern: str
    says: str
    fix: str
    within: str = ""
    unless: str = ""
    page: Page | None = None
    likely: bool = False
    severity: Severity = Severity.ERROR
    torch: str = ""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The pattern, compiled."""
        return re.compile(self.pattern)

    def match(self, text: str, traceback: str = "") -> Mapping[str, str] | None:
        """The groups of the first match in ``text``; None if it is not this failure."""
        if not any(anchor in text for anchor in self.anchors):
            return None
        if self.within and not re.search(self.within, traceback):
            return None
        if self.unless and re.search(self.unless, traceback):
            return None
        found = self.regex.search(text)
        if found is None:
            return None
        return {name: value for name, value in found.groupdict().items() if value}

    def said(self, groups: Mapping[str, str]) -> str:
        """The predicate of the sentence about it."""

        def filled(part: re.Match[str]) -> str:
            try:
                return part[1].format(**groups)
            except KeyError:
                return ""

        return _OPTIONAL.sub(filled, self.says).format(**groups)
