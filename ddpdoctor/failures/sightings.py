"""What was seen at one place of a log, and what only the whole log shows of it."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpdoctor.core.finding import Location
from ddpdoctor.failures import Failure, Weight
from ddpdoctor.failures.prefixes import TASK

STATUS = re.compile(r"exitcode\s*:")
"""In the line of torchrun's report with how a rank ended."""

_REPORTED = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Warning)\b|\s*what\(\)|terminate called"
    r"|slurmstepd|srun:|ERROR:|\s*exitcode\s*:|\[?[IWEF](?:\d{3,4} | \S+\.cpp)|\[Rank \d)"
    r"|: error: |NCCL WARN|Warning: |\(exitcode: "
)
"""How a failure reports itself; other lines that speak of one are the job's own remarks."""

NUMBER = re.compile(r"[\d.,:]+")
ALIKE = 60
"""Letters of two lines, without numbers, that are compared for whether they are alike."""

_SURVIVED = 500
"""Lines between two exceptions that are alike, by which the first one did not end the job."""

_REMARKS = 20
"""The same for lines that call themselves errors."""

_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*")
_AGENT = re.compile(r"torch[./]distributed[./](?:elastic|run|launch)\b|^torchrun: ")

WARNING = re.compile(
    r"(?:\[rank\d+\]:)?\s*\[?W\d{3,4} "
    r"|(?:\[[^\]]{1,40}\] )?(?:WARNING:)?torch\.distributed\.elastic\.rendezvous\.\w+:"
)
"""How a warning begins that torch logs."""

_PYTHON_WARNING = re.compile(r"\b[A-Z]\w+Warning: ")


@dataclass
class Sighting:
    """A known failure, or an unknown exception, at its place in a log.

    Attributes:
        failure: None for an exception that the table does not know.
        groups: What the pattern's groups matched.
        text: The line, or the exception with its message.
        source: The log's name.
        line: The line's number there, from 1.
        last: The number of the last line of what was printed.
        order: The log's place among the logs, and the line's offset in it.
        rank: Whose it is, if it is known.
        time: Seconds, if the line or one shortly before it has one.
        final: It ended its process, as far as can be seen: nothing plain was written after it.
        location: The innermost line of the user's code, for exceptions.
        traceback: The whole text of it.
        context: The exception that it was raised while handling, the first one of a chain.
        who: The process or node that the line's prefix names.
        bare: An exception without a traceback, which may be a remark.
        uncaught: It ended its process, whatever came after it.
        woven: Its traceback is mixed up with those of others.
        doing: Of one that waited in vain: the last line before it that reports no failure.
        spoken: Of a cause: its line is not how a failure reports itself.
        ignored: Python says that it goes on in spite of it.
        followed: Of what ended a process: lines of another run at work come behind it.
        root: torchrun names it as what it noticed first.
        went_on: Its process printed more, and then the exception that ended it.
        behind: Lines behind it until the next one that ended a process, or until the log's end if
            the job is at work there; 0 for an exception if stdout may have held them back.
    """

    failure: Failure | None
    groups: Mapping[str, str]
    text: str
    source: str
    line: int
    order: tuple[int, int]
    last: int = 0
    rank: int | None = None
    time: float | None = None
    final: bool = True
    location: Location | None = None
    traceback: str = ""
    context: str = ""
    who: str = ""
    bare: bool = False
    uncaught: bool = False
    woven: bool = False
    doing: str = ""
    spoken: bool = False
    ignored: bool = False
    followed: bool = False
    root: bool = False
    behind: int = 0
    went_on: bool = False
    plain_after: int = 0
    lines_after: int = 0

    @property
    def weight(self) -> Weight:
        """How much it explains; an exception that is not known is a cause."""
        if self.ignored:
            return Weight.FACT
        if self.failure is None:
            return Weight.BARE if self.bare else Weight.CAUSE
        return self.failure.weight

    @property
    def is_warning(self) -> bool:
        """Whether it was logged as a warning by torch, which goes on after it."""
        return WARNING.match(self.text) is not None

    @property
    def warned(self) -> bool:
        """Whether it is a warning of Python's, which an exception may follow from."""
        return not self.traceback and _PYTHON_WARNING.search(self.text) is not None


def corrected(sightings: Sequence[Sighting]) -> list[Sighting]:
    """The sightings of a whole log, in the order of its lines, as the whole log shows them."""
    found = _once(sightings)
    _unnumber_nodes(found)
    _were_survived(found)
    return found


def _once(sightings: Sequence[Sighting]) -> list[Sighting]:
    """Without exceptions that Python printed and torch then printed again, with the rank."""
    ranks: dict[tuple[str, Location | None], set[int]] = {}
    plain = Counter[tuple[str, Location | None]]()
    for each in sightings:
        if each.traceback and each.rank is not None:
            ranks.setdefault((each.text, each.location), set()).add(each.rank)
        elif each.traceback:
            plain[each.text, each.location] += 1
    twice = {key for key, whose in ranks.items() if plain[key] <= len(whose)}
    return [
        each
        for each in sightings
        if not each.traceback or each.rank is not None or (each.text, each.location) not in twice
    ]


def _were_survived(sightings: Sequence[Sighting]) -> None:
    """What the job went on after long before, it was not ended by when it said so again."""
    earlier: dict[tuple[Failure | None, str], int] = {}
    for each in sightings:
        is_remark = each.weight == Weight.REMARK
        if not (is_remark or each.traceback) or each.uncaught:
            continue
        text = _REPEATED.sub("", each.text.partition("\n")[0])
        key = each.failure, NUMBER.sub("", text)[:ALIKE]
        if not each.final:
            earlier.setdefault(key, each.line)
        elif each.line - earlier.get(key, each.line) >= (_REMARKS if is_remark else _SURVIVED):
            each.final = False


def _unnumber_nodes(sightings: Sequence[Sighting]) -> None:
    """Take srun's labels for numbers of nodes where each of its tasks is a torchrun."""
    labelled = [each for each in sightings if each.who.startswith(TASK)]
    nodes = any(_AGENT.search(each.text) for each in labelled)
    for each in labelled:
        if nodes and not STATUS.search(each.text):
            each.rank = None
        else:
            each.who = ""


def is_spoken(text: str, failure: Failure) -> bool:
    """Whether a line only speaks of a cause, which reports itself in other ways."""
    return not _REPORTED.search(text) and _is_always_reported(failure)


@functools.cache
def _is_always_reported(failure: Failure) -> bool:
    """Whether all examples of a failure are exceptions or lines of a logger, not plain words."""
    is_cause = failure.weight == Weight.CAUSE
    return is_cause and all(_REPORTED.search(example) for example in failure.examples)
