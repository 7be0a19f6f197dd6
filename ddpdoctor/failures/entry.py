"""An entry of the table of known failures, and the literals that a text must hold for it to match.

To look for a literal takes a hundredth of the time of most patterns. The literals are read off the
tree that Python's own parser of patterns makes (``re._parser``, before 3.11 ``sre_parse``);
without that module each text is matched, more slowly.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from textwrap import indent
from typing import Any, NamedTuple

from ddpdoctor.core.finding import Severity

# -- what a text has to hold for a pattern to match it: literals, of which one is in each match


_Tree = dict[str, "_Tree"]
"""The letters that literals begin with, each with those that follow; "" where one ends."""

LEAST = 3
"""Letters that a literal has at least."""

_ENOUGH = 8
"""Letters beyond which a literal is not found sooner."""


def _parser() -> Any:
    name = "re._parser" if sys.version_info >= (3, 11) else "sre_parse"
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def required(pattern: str) -> tuple[str, ...]:
    """Literals of which each text that the pattern matches holds one; none if that is not clear."""
    parser = _parser()
    if parser is None or re.compile(pattern).flags & re.IGNORECASE:
        return ()
    return tuple(dict.fromkeys(_of(parser.parse(pattern))))


def any_of(literals: Iterable[str]) -> re.Pattern[str]:
    """A pattern that each text matches which holds one of some literals, and few other texts.

    It takes a sixth of the time that it takes to look for each.
    """
    tree: _Tree = {}
    for literal in literals:
        at = tree
        for letter in literal[:_ENOUGH]:
            at = at.setdefault(letter, {})
        at[""] = {}
    return re.compile(_branches(tree))


def _branches(tree: _Tree) -> str:
    """What stands behind the letters so far: nothing more where one of the literals ends."""
    if "" in tree:
        return ""
    branches = [re.escape(each) + _branches(tree[each]) for each in tree]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _of(sequence: Any) -> list[str]:
    """The same of a sequence of the tree: the best of what its parts require."""
    best: list[str] = []
    run = ""
    for kind, value in (*sequence, ("END", None)):
        name = str(kind)
        if name == "LITERAL":
            run += chr(value)
        elif name not in ("AT", "ASSERT_NOT"):
            # What matches a place alone (`^`, `\b`) parts no literal.
            run += _once(name, value)
            best = max(best, [run], _of_part(name, value), key=_worth)
            run = ""
    return best if _worth(best) else []


def _once(name: str, value: Any) -> str:
    """What is there at least once of a letter that may be repeated: ``g`` of ``g+``."""
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
    """How much it helps to look for them: the shortest decides, then their number."""
    shortest = min(map(len, literals), default=0)
    return (min(shortest, _ENOUGH), -len(literals)) if shortest >= LEAST else (0, 0)


# -- what the table of known failures is made of


_FIELD = re.compile(r"\{(\w+)\}")
_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")


class Weight(IntEnum):
    """How much a printed line explains; the verdict is the earliest of the heaviest."""

    FACT = 1
    """Says nothing by itself, and more about another failure."""
    NOTE = 2
    """Worth knowing, and no failure."""
    REMARK = 3
    """A line that calls itself an error."""
    WRAPPER = 4
    """A launcher says that a rank failed."""
    CONSEQUENCE = 5
    """A rank lost a peer: never the verdict where a cause is seen."""
    BARE = 6
    """An exception without its traceback, which may be a remark."""
    STOPPED = 7
    """Somebody ended the job, perhaps because it hung."""
    SYMPTOM = 8
    """No peer came, or none answered: the verdict only where no rank shows a cause."""
    GENERIC = 9
    """A cause that another line may explain better."""
    CAUSE = 10
    DECISIVE = 11
    """The system or the scheduler says what it did; exceptions may follow from it."""


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


class Known(NamedTuple):
    """Which failure it is."""

    code: str
    """The code of the fault, which may be that of a rule that sees it otherwise, too."""
    name: str
    """Short name within the table."""
    weight: Weight
    seen: str
    """Where it was seen printed: versions of torch, or other."""


@dataclass(frozen=True)
class Failure:
    """A failure by the text that it prints.

    Attributes:
        known: Which one it is.
        pattern: Regular expression, for a line or an exception's whole message. A group ``rank``
            is the guilty rank; all groups can stand in ``says``.
        says: What follows the subject of the sentence; a part in brackets is left out where one of
            its groups matched nothing.
        fix: What to change.
        within: Regular expression that the frames of an exception have to match besides.
        unless: Regular expression that they, or a line without any, must not match: the same words
            of other libraries.
        page: The code's page; None where a rule has it, or an earlier entry of that code.
        likely: The text alone does not prove it.
        severity: Of its finding.
        examples: Lines of logs that show it, and no other failure of the table.
        yields_to: Names of failures of the same weight that are nearer to the cause, where one of
            them is in the log, too.
        follows: Names of failures that explain it where they stand before it.
    """

    known: Known
    pattern: str
    says: str
    fix: str
    examples: tuple[str, ...] = ()
    within: str = ""
    unless: str = ""
    page: Page | None = None
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
        """Literals of which each text that the pattern matches has one; none if that is not clear.

        `recognise` looks for them first.
        """
        return required(self.pattern)

    @property
    def words(self) -> tuple[str, ...]:
        """All literals of the pattern that are a word at least: some of them are in each match."""
        return tuple(run for run in _runs(self.pattern) if len(run) >= LEAST)

    @property
    def texts(self) -> tuple[str, ...]:
        """Parts of what is printed, for who searches for it."""
        runs = (run.strip() for run in _runs(re.sub(r"\[(\w)\w\]", r"\1", self.pattern)))
        return tuple(run for run in runs if len(run) >= _TELLING)

    def match(self, text: str, traceback: str = "") -> Mapping[str, str] | None:
        """The groups of the first match in ``text``; None if it is not this failure."""
        found = self.regex.search(text)
        if found is None or (self.within and not re.search(self.within, traceback)):
            return None
        if self.unless and re.search(self.unless, traceback or text):
            return None
        return {name: value for name, value in found.groupdict().items() if value}

    def said(self, groups: Mapping[str, str]) -> str:
        """The predicate of the sentence about it."""

        def kept(part: re.Match[str]) -> str:
            return part[1] if all(name in groups for name in _FIELD.findall(part[1])) else ""

        # Not `str.format` twice: what a log says may hold braces.
        return _FIELD.sub(lambda field: groups[field[1]], _OPTIONAL.sub(kept, self.says))


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
        if not any(text in example for text in (*failure.literals, *failure.texts)):
            raise ValueError(f"{name}: its pattern has no literal of {LEAST} letters")


_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P<\w+>|\(\?<?[:=!]|\(\?\w+\)|\{[\d,]+\}\??|[*+?]\??|."
)
_TELLING = 10
"""Letters of a literal that a person may search for."""


def _runs(pattern: str) -> Iterator[str]:
    """The literals of a pattern."""
    run = ""
    for token in (*_TOKEN.findall(pattern), "|"):
        is_class = token[0] in "[^$." or (token[0] == "\\" and token[1].isalnum())
        if token[0] not in "|()*+?{" and not is_class:
            run += token[-1]
            continue
        if token[0] in "*?{":
            # What is before it may be missing.
            run = run[:-1]
        yield run
        run = ""
