"""Occurrences of failures in a log, and the division of a log into several runs of a job.

Each attempt may append to a log, and the last run is the one of interest. A run begins at a
launcher's start line that follows a report that its processes failed. (With several nodes in one
log, all launchers start before any of them fails.) Without such a line, what follows an end belongs
to a later run if it is many lines without failure, a working job, the end of another Slurm job, or
the end of a rank with another process id.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.failures.entry import Failure, Weight
from ddpdoctor.failures.lines import TASK

# -- Occurrences


STATUS = re.compile(r"exitcode\s*:")  # In the line of torchrun's report about the end of a rank

_REPORTED = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Warning)\b|\s*what\(\)|terminate called"
    r"|slurmstepd|srun:|ERROR:|\s*exitcode\s*:|\[?[IWEF](?:\d{3,4} | \S+\.cpp)|\[Rank \d)"
    r"|Memory access fault|: error: |NCCL WARN|Warning: |\(exitcode: |THCudaCheck FAIL|OMP: Error"
    r"|\bfork: |UCX +ERROR|initialize NVML: |aborting with error : HSA|Duplicate GPU detected"
    r"|\bNVLink |NVRM: |PCIe Bus Error|thermal shutdown"
)
"""How a failure reports itself. Other lines that mention one are the job's own remarks."""

LAST_WORDS = "last-words"
"""Name of what is said of a log that only ends with words for a failure."""

NUMBER = re.compile(r"[\d.,:]+")
ALIKE = 60  # Letters of two lines, without numbers, that are compared for similarity

_SURVIVED = 500
"""Lines between two similar exceptions that prove that the first one did not end the job."""

REMARKS = 20  # The same for lines that contain the word error

_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*")
_AGENT = re.compile(r"torch[./]distributed[./](?:elastic|run|launch)\b|^torchrun: ")

WARNING = re.compile(
    r"(?:\[rank\d+\]:)?\s*\[?W\d{3,4} "
    r"|(?:\[[^\]]{1,40}\] )?(?:WARNING:)?torch\.distributed\.elastic\.rendezvous\.\w+:"
)
"""The beginning of a warning logged by torch."""

_PYTHON_WARNING = re.compile(r"\b[A-Z]\w+Warning: ")


@dataclass
class Occurrence:
    """A known failure, or an unknown exception, in a log.

    Attributes:
        failure: None for an exception that is not in the table.
        groups: The matches of the pattern's groups.
        text: The line, or the exception with its message.
        source: The log's name.
        line: The number of its line, from 1.
        last: The number of its last line.
        order: The index of the log, and the offset in it.
        rank: The rank that printed it, if known.
        time: Seconds, if the line or an earlier one has a time.
        final: It ended its process, as far as the log shows: no plain line follows.
        location: The innermost line of the user's code, for exceptions.
        traceback: The whole text of an exception's traceback.
        numbers: The number of each of its lines.
        context: The first exception of a chain.
        who: The process or node in the line's prefix.
        bare: An exception without a traceback, which may have been only logged.
        uncaught: It ended its process, whatever follows.
        interleaved: Its traceback is mixed with those of other processes.
        doing: For a timeout: the last earlier line that reports no failure.
        mention: The line mentions a cause, but is not how the failure reports itself.
        ignored: Python says that it continues in spite of it.
        followed: For an end of a process: lines of another, working run follow.
        root: torchrun names it as the first failure.
        went_on: Its process printed more, and then the exception that ended it.
        behind: Lines after it until the next end of a process, or until the log's end if the job
            works there. 0 for an exception if these lines may be buffered output.
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
    numbers: tuple[int, ...] = ()
    context: str = ""
    who: str = ""
    bare: bool = False
    uncaught: bool = False
    interleaved: bool = False
    doing: str = ""
    mention: bool = False
    ignored: bool = False
    followed: bool = False
    root: bool = False
    behind: int = 0
    went_on: bool = False
    plain_after: int = 0
    lines_after: int = 0

    @property
    def weight(self) -> Weight:
        """How much it explains. An unknown exception is a cause."""
        if self.ignored:
            return Weight.FACT
        if self.failure is None:
            return Weight.BARE if self.bare else Weight.CAUSE
        return self.failure.weight

    @property
    def is_warning(self) -> bool:
        """Whether torch logged it as a warning, after which it continues."""
        return WARNING.match(self.text) is not None

    @property
    def warned(self) -> bool:
        """Whether it is a Python warning, which may precede an exception."""
        return not self.traceback and _PYTHON_WARNING.search(self.text) is not None


def name_of(each: Occurrence) -> str:
    """Return the name of a failure in the table, or ``exception``."""
    return "exception" if each.failure is None else each.failure.known.name


def corrected(occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Correct the occurrences of a whole log, in the order of its lines, by each other."""
    found = _completed(_without_teardown(_once(occurrences)))
    _unnumber_nodes(found)
    _were_survived(found)
    return found


def _once(occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Drop exceptions that Python printed and torch printed again, with the rank."""
    ranks: dict[tuple[str, Location | None], set[int]] = {}
    plain = Counter[tuple[str, Location | None]]()
    for each in occurrences:
        if each.traceback and each.rank is not None:
            ranks.setdefault((each.text, each.location), set()).add(each.rank)
        elif each.traceback:
            plain[each.text, each.location] += 1
    twice = {key for key, whose in ranks.items() if plain[key] <= len(whose)}
    return [
        each
        for each in occurrences
        if not each.traceback or each.rank is not None or (each.text, each.location) not in twice
    ]


def _without_teardown(occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Drop the text of a C++ exception whose next lines say that a process group was destroyed."""
    ends = {each.line for each in occurrences if name_of(each) == "nccl-torn-down"}
    return [
        each
        for each in occurrences
        if not (each.text.startswith("what()") and ends & {each.line + 1, each.line + 2})
    ]


_COMPLETES = {
    "unused-listed": ("unused-parameters", "outputs-without-loss"),
    "first-process": (
        *("first-exit", "killed-status", "crash-status", "illegal-instruction", "abort-status"),
        "bus-error",
    ),
}
"""Lines that say more of another failure, with the names of those."""

_NEAR = 8  # Maximum lines between the two


def _completed(occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Give failures the ranks and names that a line of their own has."""
    found = [*occurrences]
    for fact in occurrences:
        names = _COMPLETES.get(name_of(fact), ())
        near = (
            at
            for at, each in enumerate(found)
            if _is(each, *names)
            and abs(each.line - fact.line) <= _NEAR
            and "rank" not in each.groups
        )
        if (at := next(near, None)) is None:
            continue
        each, own = found[at], fact.groups
        found[at] = replace(
            each,
            groups={**own, **each.groups},
            rank=each.rank if fact.rank is None else fact.rank,
            who=own.get("host", each.who),
            # The line that goes on with a message proves that it was raised.
            mention=False,
            final=each.final or each.mention,
        )
    return found


def _were_survived(occurrences: Sequence[Occurrence]) -> None:
    """Mark repetitions of an exception that the job survived long before as not final."""
    earlier: dict[tuple[Failure | None, str], int] = {}
    for each in occurrences:
        is_remark = each.weight == Weight.REMARK
        if not (is_remark or each.traceback) or each.uncaught:
            continue
        text = _REPEATED.sub("", each.text.partition("\n")[0])
        key = each.failure, NUMBER.sub("", text)[:ALIKE]
        if not each.final:
            earlier.setdefault(key, each.line)
        elif each.line - earlier.get(key, each.line) >= (REMARKS if is_remark else _SURVIVED):
            each.final = False


def _unnumber_nodes(occurrences: Sequence[Occurrence]) -> None:
    """Take srun's labels as node numbers if each of its tasks is a torchrun."""
    labelled = [each for each in occurrences if each.who.startswith(TASK)]
    nodes = any(_AGENT.search(each.text) for each in labelled)
    for each in labelled:
        if nodes and not STATUS.search(each.text):
            each.rank = None
        else:
            each.who = ""


def likely(mention: Occurrence, failure: Failure, severity: Severity) -> Occurrence:
    """Return the mention of a cause as the likely cause."""
    failure = replace(failure, likely=True, severity=severity)
    return replace(mention, failure=failure, mention=False, final=True)


def is_mention(text: str, failure: Failure) -> bool:
    """Return whether a line only mentions a cause, which reports itself in another form."""
    return not _REPORTED.search(text) and _is_always_reported(failure)


@functools.cache
def _is_always_reported(failure: Failure) -> bool:
    """Return whether all examples of a failure are exceptions or lines of a logger."""
    is_cause = failure.weight == Weight.CAUSE
    return is_cause and all(_REPORTED.search(example) for example in failure.examples)


# -- Runs


ENDED = (Weight.WRAPPER, Weight.STOPPED, Weight.GENERIC, Weight.DECISIVE)
"""Weights of reports about the end of a run, by launcher, scheduler or system."""

_SUMMARY = re.compile(r"exitcode\s*: -?\d+ \(pid: (\d+)\)")
"""The process of a failed rank in torchrun's report."""

_START_ERRORS = re.compile(r"(?:IndentationError|SyntaxError|TabError|ModuleNotFoundError)\b")
"""Exceptions that Python raises before a script's first line, on each rank."""

_SCRIPT = re.compile(r'^\s*File "([^"\n]+)", line \d+, in <module>$', re.MULTILINE)
LAUNCHER = re.compile(
    r"[/\\]bin[/\\](?:torchrun|accelerate|deepspeed|horovodrun)\"|(?:deepspeed[/\\]launcher|composer[/\\]cli|horovod[/\\]runner|colossalai[/\\]cli)[/\\](?:\w+[/\\])?(?:runner|run|launch|launcher|__init__)\.py|torch[/\\]distributed[/\\](?:run|launch|launcher[/\\]api)"
    r"\.py|accelerate[/\\]commands[/\\]launch\.py"
)
"""In the traceback of a launcher, of which a job has one on each node."""

_STARTING = 5  # Lines after a launcher's first ones that show no run yet
BETWEEN = 2  # Minimum lines that a process prints before an exception ends it
LATER = 100  # Lines after the end of a run that belong to a later one

MUCH_LATER = 200
"""The same after an exception that ended one process, since others may continue for a while."""


@dataclass(frozen=True)
class Runs:
    """The runs in some logs.

    Attributes:
        last: Occurrences in the last run of each log.
        earlier: For each log with several runs, occurrences in the last but one.
        borders: The first line of the last run, by log.
    """

    last: list[Occurrence]
    earlier: list[list[Occurrence]]
    borders: dict[str, int]


def split(occurrences: Sequence[Occurrence]) -> Runs:
    """Divide the occurrences of some logs by runs."""
    found = Runs([], [], {})
    logs: dict[str, _Log] = {}
    for each in sorted(occurrences, key=lambda each: each.order):
        logs.setdefault(each.source, _Log()).take(each)
    for source, log in logs.items():
        log.close()
        found.last.extend(log.runs[-1])
        if len(log.runs) > 1:
            found.earlier.append(log.runs[-2])
            found.borders[source] = log.begins[-1]
    return found


class _Log:
    """Divides one log into runs, as its occurrences are added.

    Attributes:
        runs: The occurrences of each run so far.
        begins: The first line of each run.
    """

    def __init__(self) -> None:
        self.runs: list[list[Occurrence]] = [[]]
        self.begins = [1]
        self._restart()

    def _restart(self) -> None:
        self._over = False
        self._job = self._start_error = ""
        # The script that an exception ended last with its process, and the occurrences until then.
        self._script, self._script_ended = ("", ""), 0
        self._pids: dict[int | None, str] = {}
        # Occurrences of the last run until the last end of a process, and until torchrun last named
        # one.
        self._ended = self._named = 0

    def take(self, each: Occurrence) -> None:
        """Add the next occurrence."""
        said = any(one.text for one in self.runs[-1])
        if len(self.runs) > 1 and not said and _again(each, self.runs[-2]):
            # Usage messages and tracebacks of all ranks may have hundreds of lines.
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

    def _ends(self, each: Occurrence) -> None:
        """Check whether the current run ends with its newest occurrence, or a process of it."""
        run = self.runs[-1]
        if _is_refused(each) or (each.uncaught and _START_ERRORS.match(each.text)):
            # No rank of the run can have got any further.
            self._start_error = _words(each)
        reported = each.weight in ENDED and each.final
        named = STATUS.search(each.text) and each.final
        if reported or named or each.uncaught or _is_refused(each):
            self._over = True
            self._ended = len(run)
        behind = each.behind >= (LATER if reported else MUCH_LATER)
        if each.followed or (self._over and behind):
            self._another(len(run))

    def _border(
        self, each: Occurrence, job: str, pid: str, launcher: tuple[str, str] | None
    ) -> int | None:
        """Return the index in the last run at which another run begins, or None."""
        run = self.runs[-1]
        if self._over and self._job not in ("", job):
            return self._ended
        if self._over and pid and self._pids.get(each.rank, pid) != pid:
            return self._named
        if self._over and _is(each, "launch"):
            # A launcher's notes precede its banner.
            own = takewhile(lambda seen: seen.weight == Weight.NOTE, reversed(run))
            return len(run) - len(list(own))
        other = self._start_error and not _same_words(_words(each), self._start_error)
        raised = bool(each.traceback) and each.weight in (Weight.CAUSE, Weight.STOPPED)
        if other and (raised or _is_refused(each)):
            return len(run)
        # Each node has one launcher, and this node's had ended already.
        return self._script_ended if launcher == self._script else None

    def close(self) -> None:
        """Finish the log. A launcher's first lines may be buffered until its end."""
        last = self.runs[-1]
        begun = last and all(_is(each, "launch") and each.behind < _STARTING for each in last)
        if (begun or _is_tail(last)) and len(self.runs) > 1:
            self._join()
        border = _appended(self.runs[-1])
        if border is not None:
            self._another(border)

    def _join(self) -> None:
        """Join the last run with the one before it."""
        self.begins.pop()
        last = self.runs.pop()
        self.runs[-1] += last

    def _another(self, at: int) -> None:
        """Begin another run at this occurrence."""
        run = self.runs[-1]
        self.runs.append(run[at:])
        del run[at:]
        self.begins.append(run[-1].last + 1)
        if _is_tail(run) and len(self.runs) > 2:
            del self.runs[-2], self.begins[-2]
            self.runs[-2] += run
        self._restart()


def _is_tail(run: Sequence[Occurrence]) -> bool:
    """Return whether these are the last lines of the previous run's launcher, with its banner."""
    stopped = any(_is(each, "stopped-status") for each in run)
    return stopped and all(_is(each, "launch", "stopped-status") for each in run)


def _appended(run: Sequence[Occurrence]) -> int | None:
    """Return where the last run of a single process that appends to its log begins, or None.

    Such a process has no launcher that prints a start line. Each exception that leaves its script
    ends a run.
    """
    if any(each.rank is not None or each.who or each.interleaved for each in run):
        return None
    if any(Weight.WRAPPER <= each.weight <= Weight.CONSEQUENCE for each in run):
        return None
    ends = [at for at, each in enumerate(run) if _script_of(each)[0]]
    if len(ends) < 2 or _script_of(run[ends[-1]]) != _script_of(run[ends[-2]]):
        return None
    before, last = run[ends[-2]], run[ends[-1]]
    # Exceptions of several processes follow each other.
    apart = last.line - before.last > BETWEEN
    alone = last.weight is Weight.CAUSE and not _script_of(last)[1]
    return ends[-2] + 1 if apart and alone else None


def _first(each: Occurrence) -> str:
    """Return its first line, since others may be of another process."""
    return each.text.partition("\n")[0]


def _script_of(each: Occurrence) -> tuple[str, bool]:
    """Return the script that an exception ended, and whether it is a launcher."""
    alone = each.uncaught and each.rank is None and not each.interleaved
    found = _SCRIPT.search(each.traceback) if alone else None
    if found is None:
        return "", False
    return found[1], LAUNCHER.search(each.traceback) is not None


def _is_refused(each: Occurrence) -> bool:
    """Return whether a program or its launcher refused its options and ended."""
    script = _is(each, "options-refused") and "what" in each.groups
    return each.final and (script or _is(each, "torchrun-too-old", "local-rank-option"))


def _again(each: Occurrence, run: Sequence[Occurrence]) -> bool:
    """Return whether another rank fails as one did at the end of a run."""
    if _is_refused(each) and _is_refused(run[-1]):
        return _same_words(_words(each), _words(run[-1]))
    alike = [one for one in run if one.failure is each.failure and _words(one) == _words(each)]
    return bool(each.text and alike) and each.rank not in {None, *(one.rank for one in alike)}


def _words(each: Occurrence) -> str:
    """Return its first line without numbers, which differ between ranks."""
    return NUMBER.sub("", _first(each))


def _same_words(one: str, other: str) -> bool:
    """Return whether two lines are equal. One may be truncated."""
    return one.startswith(other) or other.startswith(one)


def _is(each: Occurrence, *names: str) -> bool:
    return each.failure is not None and each.failure.known.name in names
