"""What was seen at each place of a log, and how the log divides into several runs of a job.

A log is appended to by each try, or a script starts its job again: the last run is what is asked
about. A border is a line that a launcher prints when it starts, after one that says that a
launcher's processes failed: with several nodes in one log all launchers start before any of them
fails. Where no launcher says that it starts, what comes after such an end is of a later run if it
is many lines that report no failure, a job at work, the end of another Slurm job, or that of a
rank with another process.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ddpdoctor.core.user_code import Location
from ddpdoctor.failures.entry import Failure, Weight
from ddpdoctor.failures.lines import TASK

# -- what was seen at one place of a log, and what only the whole log shows of it


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


# -- runs


ENDED = (Weight.WRAPPER, Weight.STOPPED, Weight.GENERIC, Weight.DECISIVE)
"""What is said where a run ends: by its launcher, a scheduler, or the system."""

_SUMMARY = re.compile(r"exitcode\s*: -?\d+ \(pid: (\d+)\)")
"""Where torchrun names the process of a rank that failed."""

_STILLBORN = re.compile(r"(?:IndentationError|SyntaxError|TabError|ModuleNotFoundError)\b")
"""What Python raises before a script's first line, on each rank."""

_SCRIPT = re.compile(r'^\s*File "([^"\n]+)", line \d+, in <module>$', re.MULTILINE)
_LAUNCHER = re.compile(
    r"deepspeed[/\\]launcher[/\\]runner\.py|torch[/\\]distributed[/\\](?:run|launch|launcher[/\\]api)"
    r"\.py|accelerate[/\\]commands[/\\]launch\.py"
)
"""In the traceback of a script that starts the ranks, of which a job has one on each node."""

BETWEEN = 2
"""Lines that a process prints at least before an exception ends it."""

LATER = 100
"""Lines behind the end of a run that are of a later one."""

MUCH_LATER = 200
"""The same behind an exception that ended one process: others may go on for a while."""


@dataclass(frozen=True)
class Runs:
    """The runs in some logs.

    Attributes:
        last: What was seen of the last run of each log.
        earlier: Of each log with several, what was seen of the one before the last.
        borders: The line with which the last run begins, by log.
    """

    last: list[Sighting]
    earlier: list[list[Sighting]]
    borders: dict[str, int]


def split(sightings: Sequence[Sighting]) -> Runs:
    """Part the sightings of some logs by runs."""
    found = Runs([], [], {})
    logs: dict[str, _Log] = {}
    for each in sorted(sightings, key=lambda each: each.order):
        logs.setdefault(each.source, _Log()).take(each)
    for source, log in logs.items():
        log.close()
        found.last.extend(log.runs[-1])
        if len(log.runs) > 1:
            found.earlier.append(log.runs[-2])
            found.borders[source] = log.begins[-1]
    return found


class _Log:
    """The runs of one log, as its sightings are taken in.

    Attributes:
        runs: The sightings of each run so far.
        begins: The line with which each of them begins.
    """

    def __init__(self) -> None:
        self.runs: list[list[Sighting]] = [[]]
        self.begins = [1]
        self._restart()

    def _restart(self) -> None:
        self._over = False
        self._job = self._stillborn = ""
        # The script that an exception ended last, whose it was, and how many sightings there were.
        self._script, self._script_ended = ("", ""), 0
        self._pids: dict[int | None, str] = {}
        # How many of the last run's sightings there were when a process was seen to end last, and
        # when torchrun named a rank's last.
        self._ended = self._named = 0

    def take(self, each: Sighting) -> None:
        """Take the next sighting in."""
        said = any(one.text for one in self.runs[-1])
        if len(self.runs) > 1 and not said and _again(each, self.runs[-2]):
            # The usage of each rank may have hundreds of lines, and so have hundreds of tracebacks.
            self._join()
        job = each.groups.get("job", self._job)
        status = _SUMMARY.match(each.text)
        pid = status[1] if status and each.rank is not None else ""
        script, launches = _script_of(each)
        border = self._border(each, job, pid, (each.who, script) if launches else None)
        if border is not None:
            self._another(border)
            if _is(each, "launch"):
                self.begins[-1] = each.line
        run = self.runs[-1]
        run.append(each)
        if script:
            self._script, self._script_ended = (each.who, "" if launches else script), len(run)
        self._job = job
        if pid:
            self._pids[each.rank] = pid
            self._named = len(run)
        self._ends(each)

    def _ends(self, each: Sighting) -> None:
        """Whether the run under way ends with its newest sighting, or has something end in it."""
        run = self.runs[-1]
        if _is_stillborn(each):
            self._stillborn = _first(each)
        reported = each.weight in ENDED and each.final
        named = STATUS.search(each.text) and each.final
        if reported or named or each.uncaught or _is_refused(each):
            self._over = True
            self._ended = len(run)
        behind = each.behind >= (LATER if reported else MUCH_LATER)
        if each.followed or (self._over and behind):
            self._another(len(run))

    def _border(
        self, each: Sighting, job: str, pid: str, launcher: tuple[str, str] | None
    ) -> int | None:
        """With which of the last run's sightings another run begins; None if none does."""
        run = self.runs[-1]
        if self._over and self._job not in ("", job):
            return self._ended
        if self._over and pid and self._pids.get(each.rank, pid) != pid:
            return self._named
        if self._over and _is(each, "launch"):
            # What the launcher says of itself comes before its banner.
            own = takewhile(lambda seen: seen.weight == Weight.NOTE, reversed(run))
            return len(run) - len(list(own))
        other = self._stillborn and not _same_words(_first(each), self._stillborn)
        if other and (_is_raised(each) or _is_refused(each)):
            return len(run)
        # Each node has one launcher, and this one's had ended already.
        return self._script_ended if launcher == self._script else None

    def close(self) -> None:
        """Take the end of the log in: a launcher's first words may come out of its buffer last."""
        if _is_tail(self.runs[-1]) and len(self.runs) > 1:
            self._join()
        border = _appended(self.runs[-1])
        if border is not None:
            self._another(border)

    def _join(self) -> None:
        """What was taken for the last run is of the one before it."""
        self.begins.pop()
        last = self.runs.pop()
        self.runs[-1] += last

    def _another(self, at: int) -> None:
        """The sightings from one on are of another run."""
        run = self.runs[-1]
        self.runs.append(run[at:])
        del run[at:]
        self.begins.append(run[-1].last + 1)
        if _is_tail(run) and len(self.runs) > 2:
            del self.runs[-2], self.begins[-2]
            self.runs[-2] += run
        self._restart()


def _is_tail(run: Sequence[Sighting]) -> bool:
    """Whether it is what a launcher of the run before printed last, its banner included."""
    stopped = any(_is(each, "stopped-status") for each in run)
    return stopped and all(_is(each, "launch", "stopped-status") for each in run)


def _appended(run: Sequence[Sighting]) -> int | None:
    """Where the last run of a single process begins that appends to its log, None if none does.

    Such a process has no launcher, which would say that it starts again; each exception that leaves
    its script ends it.
    """
    if any(each.rank is not None or each.who or each.woven for each in run):
        return None
    if any(Weight.WRAPPER <= each.weight <= Weight.CONSEQUENCE for each in run):
        return None
    ends = [at for at, each in enumerate(run) if _script_of(each)[0]]
    if len(ends) < 2 or _script_of(run[ends[-1]]) != _script_of(run[ends[-2]]):
        return None
    before, last = run[ends[-2]], run[ends[-1]]
    # Those of several processes follow each other.
    apart = last.line - before.last > BETWEEN
    alone = last.weight is Weight.CAUSE and not _script_of(last)[1]
    return ends[-2] + 1 if apart and alone else None


def _first(each: Sighting) -> str:
    """The first line of it; the others may be those of another process."""
    return each.text.partition("\n")[0]


def _script_of(each: Sighting) -> tuple[str, bool]:
    """The script that an exception ended, and whether it had started the ranks."""
    alone = each.uncaught and each.rank is None and not each.woven
    found = _SCRIPT.search(each.traceback) if alone else None
    if found is None:
        return "", False
    return found[1], _LAUNCHER.search(each.traceback) is not None


def _is_raised(each: Sighting) -> bool:
    return bool(each.traceback) and each.weight in (Weight.CAUSE, Weight.STOPPED)


def _is_stillborn(each: Sighting) -> bool:
    """Whether no rank of the run can have come any further."""
    return _is_refused(each) or (each.uncaught and _STILLBORN.match(each.text) is not None)


def _is_refused(each: Sighting) -> bool:
    """Whether a program or its launcher did not take its options, and ended."""
    script = _is(each, "options-refused") and "what" in each.groups
    return each.final and (script or _is(each, "torchrun-too-old"))


def _again(each: Sighting, run: Sequence[Sighting]) -> bool:
    """Whether another rank fails as one did at the end of a run."""
    if _is(each, "options-refused") and _is(run[-1], "options-refused"):
        return _same_words(_first(each), _first(run[-1]))
    alike = [one for one in run if one.failure is each.failure and _words(one) == _words(each)]
    return bool(each.text and alike) and each.rank not in {None, *(one.rank for one in alike)}


def _words(each: Sighting) -> str:
    """Its first line without numbers, which differ from rank to rank."""
    return NUMBER.sub("", _first(each))


def _same_words(one: str, other: str) -> bool:
    """Whether two lines say the same; one may be torn."""
    return one.startswith(other) or other.startswith(one)


def _is(each: Sighting, *names: str) -> bool:
    return each.failure is not None and each.failure.known.name in names
