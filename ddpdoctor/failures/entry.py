"""Entries of the table of known failures, and the literals that their patterns require.

Searching a literal takes a hundredth of the time of most patterns. The literals come from the
syntax tree of Python's own pattern parser.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

from ddpdoctor.core.finding import Severity

# -- Literals that a pattern requires


_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

_Tree = dict[str, "_Tree"]  # A prefix tree of literals by letter. "" marks the end of one.
MIN_LETTERS = 3  # Minimum letters of a literal
_ENOUGH = 8  # Letters beyond which a literal is not found faster


def required(pattern: str) -> tuple[str, ...]:
    """Return literals, one of which is in each match of a pattern. Empty if that is not clear."""
    # To compile all patterns of the table would take half of the time of a short log.
    tree = _parser.parse(pattern)
    return () if tree.state.flags & re.IGNORECASE else tuple(dict.fromkeys(_of(tree)))


def any_of(literals: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches each text with one of some literals, and few other texts.

    It takes a sixth of the time of searching for each literal.
    """
    tree: _Tree = {}
    for literal in literals:
        at = tree
        for letter in literal[:_ENOUGH]:
            at = at.setdefault(letter, {})
        at[""] = {}
    return re.compile(_branches(tree))


def _branches(tree: _Tree) -> str:
    """Return the pattern of a subtree. It is empty at the end of a literal."""
    if "" in tree:
        return ""
    branches = [re.escape(each) + _branches(tree[each]) for each in tree]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _of(sequence: Any) -> list[str]:
    """Return the best literals that a sequence of the syntax tree requires."""
    best: list[str] = []
    run = ""
    for kind, value in (*sequence, ("END", None)):
        name = str(kind)
        if name == "LITERAL":
            run += chr(value)
        elif name not in ("AT", "ASSERT_NOT"):
            # Zero-width matches (`^`, `\b`) do not interrupt a literal.
            run += _once(name, value)
            best = max(best, [run], _of_part(name, value), key=_worth)
            run = ""
    return best if _worth(best) else []


def _once(name: str, value: Any) -> str:
    """Return the letter of a repetition of at least one: ``g`` of ``g+``."""
    if not name.endswith("_REPEAT") or not value[0]:
        return ""
    ((kind, letter), *more) = value[2]
    return chr(letter) if str(kind) == "LITERAL" and not more else ""


def _of_part(name: str, value: Any) -> list[str]:
    if name == "SUBPATTERN":
        _, flags, _, inner = value
        return [] if flags & re.IGNORECASE else _of(inner)
    if name == "BRANCH":
        several = [_of(each) for each in value[1]]
        return [literal for each in several for literal in each] if all(several) else []
    if name.endswith("_REPEAT"):
        least, _, inner = value
        return _of(inner) if least else []
    if name == "ATOMIC_GROUP":
        return _of(value)
    return []


def _worth(literals: list[str]) -> tuple[int, int]:
    """Rate literals for a search: by the length of the shortest, then by their number."""
    shortest = min(map(len, literals), default=0)
    return (min(shortest, _ENOUGH), -len(literals)) if shortest >= MIN_LETTERS else (0, 0)


# -- Entries of the table


_FIELD = re.compile(r"\{(\w+)\}")
_OPTIONAL = re.compile(r"\[([^\[\]]*\{\w+\}[^\[\]]*)\]")


class Weight(IntEnum):
    """How much a line explains. The verdict is the earliest line of the greatest weight."""

    FACT = 1  # Adds to another failure, and says nothing alone
    NOTE = 2  # Worth knowing, but no failure
    REMARK = 3  # A line that contains the word error
    WRAPPER = 4  # A launcher reports that a rank failed
    CONSEQUENCE = 5  # A rank lost a peer. Never the verdict if a cause is known.
    BARE = 6  # An exception without its traceback, which may have been only logged
    STOPPED = 7  # Somebody stopped the job, perhaps because it hung
    SYMPTOM = 8  # No peer joined or responded. The verdict only if no rank shows a cause.
    GENERIC = 9  # A cause that another line may explain better
    CAUSE = 10
    DECISIVE = 11  # The system or scheduler reports what it did. Exceptions may follow from it.


class Known(NamedTuple):
    """The identity of a failure."""

    code: str  # The code of the fault, which may also be that of a rule
    name: str  # Short name within the table
    weight: Weight
    seen: str  # The software that prints it: versions of torch, or other


@dataclass(frozen=True)
class Failure:
    """A failure by the text that it prints.

    Attributes:
        known: Its identity.
        pattern: Regular expression for a line, or for an exception's whole message. The group
            ``rank`` is the guilty rank, ``of`` the one that printed it. ``says`` can refer to all
            groups.
        says: The predicate of the sentence. A part in brackets is left out if one of its groups
            matched nothing.
        fix: What to change. It can refer to groups as ``says`` does.
        within: Regular expression that the frames of an exception have to match as well.
        unless: Regular expression that the frames, or a line without any, must not match, for
            equal texts of other libraries.
        page: The code's page, in the form of a rule's docstring. Empty if a rule or an earlier
            entry of that code has it.
        likely: The text alone does not prove it.
        severity: Severity of its finding.
        examples: Lines of logs that show it, and no other failure of the table.
        yields_to: Names of failures of the same weight that are nearer to the cause, if the log
            has one of them.
        follows: Names of failures that explain it if they stand before it.
    """

    known: Known
    pattern: str
    says: str
    fix: str
    examples: tuple[str, ...] = ()
    within: str = ""
    unless: str = ""
    page: str = ""
    likely: bool = False
    severity: Severity = Severity.ERROR
    yields_to: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The code of the fault."""
        return self.known.code

    @property
    def weight(self) -> Weight:
        """How much it explains."""
        return self.known.weight

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The pattern, compiled."""
        return re.compile(self.pattern)

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """Literals, one of which is in each match. Each entry of the table has some.

        `recognise` searches for them first, and they select the lines of a log that are read.
        """
        return required(self.pattern)

    def match(self, text: str, traceback: str = "") -> Mapping[str, str] | None:
        """Return the groups of the first match in ``text``, or None."""
        found = self.regex.search(text)
        if found is None or (self.within and not re.search(self.within, traceback)):
            return None
        if self.unless and re.search(self.unless, traceback or text):
            return None
        return {name: value for name, value in found.groupdict().items() if value}

    def said(self, groups: Mapping[str, str]) -> str:
        """Return the predicate of the sentence about it."""
        return self._filled(self.says, groups)

    def advised(self, groups: Mapping[str, str]) -> str:
        """Return what to change."""
        return self._filled(self.fix, groups)

    def _filled(self, text: str, groups: Mapping[str, str]) -> str:
        own = self.regex.groupindex

        def kept(part: re.Match[str]) -> str:
            names = _FIELD.findall(part[1])
            return part[1] if all(name in groups for name in names) else ""

        def value(field: re.Match[str]) -> str:
            # Fixes may contain shell braces, such as ${PATH}.
            return groups.get(field[1], "?") if field[1] in own else field[0]

        # Not `str.format`, since texts of a log may contain braces.
        return _FIELD.sub(value, _OPTIONAL.sub(kept, text))


def check_failure(failure: object) -> None:
    """Check an entry of another package, on which the readers of logs rely.

    Raises:
        TypeError: It is not a `Failure`.
        ValueError: Its sentence, or its examples, do not go with its pattern.
    """
    if not isinstance(failure, Failure):
        raise TypeError(f"{failure!r} is not a Failure")
    name = failure.known.name
    unknown = set(_FIELD.findall(failure.says)) - set(failure.regex.groupindex)
    if unknown:
        raise ValueError(f"{name}: its pattern has no group {', '.join(sorted(unknown))}")
    if not failure.examples:
        raise ValueError(f"{name}: it has no examples")
    for example in failure.examples:
        if failure.regex.search(example) is None:
            raise ValueError(f"{name}: its pattern does not match {example!r}")
        if not any(text in example for text in failure.literals):
            raise ValueError(f"{name}: its pattern has no literal of {MIN_LETTERS} letters")
