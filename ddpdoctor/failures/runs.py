"""A log that holds several runs of a job, one after the other: the last one is what is asked about.

A log is appended to by each try, or a script starts its job again. A border is a line that a
launcher prints when it starts, behind one that says that a launcher's processes failed: with
several nodes in one log all launchers start before any of them fails. Where no launcher says that
it starts, what comes behind such an end is of a later run if it is many lines that report no
failure, a job at work, the end of another Slurm job, or that of a rank with another process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from ddpdoctor.failures.model import Weight
from ddpdoctor.failures.sightings import NUMBER, STATUS, Sighting

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
