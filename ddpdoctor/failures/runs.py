"""A log that holds several runs of a job, one after the other: the last one is what is asked about.

A log is appended to by each try, or a script starts its job again. A border is a line that a
launcher prints when it starts, behind one that says that a launcher's processes failed: with
several nodes in one log all launchers start before any of them fails. Where no launcher says that
it starts, many lines behind such an end that report no failure are of a later run, and so is the
end of another Slurm job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpdoctor.failures.log import Sighting
from ddpdoctor.failures.model import Weight

_LAUNCH = "launch"
_ENDED = (Weight.WRAPPER, Weight.STOPPED, Weight.GENERIC, Weight.DECISIVE)
"""What is said where a run ends: by its launcher, a scheduler, or the system."""

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
    by_source: dict[str, list[Sighting]] = {}
    for each in sightings:
        by_source.setdefault(each.source, []).append(each)
    for source, every in by_source.items():
        runs: list[list[Sighting]] = [[]]
        over = False
        begins = 1
        job, ends = "", 0
        for each in sorted(every, key=lambda each: each.order):
            if over and job not in ("", each.groups.get("job", job)):
                runs.append(runs[-1][ends:])
                del runs[-2][ends:]
                over, begins = False, runs[-2][-1].line + 1
            elif over and _is_launch(each):
                runs.append([])
                over, begins = False, each.line
            runs[-1].append(each)
            job = each.groups.get("job", job)
            ended = each.weight in _ENDED and each.final
            over = over or ended or each.uncaught
            ends = len(runs[-1]) if ended or each.uncaught else ends
            if each.behind >= (LATER if ended else MUCH_LATER) and over:
                runs.append([])
                over, begins = False, each.line + 1
        found.last.extend(runs[-1])
        if len(runs) > 1:
            found.earlier.append(runs[-2])
            found.borders[source] = begins
    return found


def _is_launch(each: Sighting) -> bool:
    return each.failure is not None and each.failure.known.name == _LAUNCH
