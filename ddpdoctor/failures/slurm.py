"""What Slurm says of a job, and the job's logs.

``scontrol`` knows a job for some minutes after its end, ``sacct`` for longer, where a cluster has
accounting.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.core.errors import DoctorError

TIMEOUT = 30.0  # Seconds for Slurm's controller to answer

_NUMBER = re.compile(r"\d{1,12}(?:[_+]\d{1,9})?")
_FIELD = re.compile(r"(?<!\S)(\w+)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)")
_SAID = ("JobState", "Reason", "ExitCode", "DerivedExitCode", "NodeList", "EndTime")
_ACCOUNTED = ("JobID", "JobName", "State", "ExitCode", "DerivedExitCode", "Reason", "NodeList")
_NAMES = {"State": "JobState", "End": "EndTime", "JobID": "JobId"}
_LONG_NUMBER = 4  # Minimum digits of a job's number that is looked for anywhere in a name
_LOG = re.compile(r"\.(?:log|out|err|txt|stdout|stderr|[oe]\d+)$")


class SlurmJob(NamedTuple):
    """A job as Slurm knows it.

    Attributes:
        said: One line for each job of an array, in words that the table of failures knows.
        logs: Its logs that are readable on this machine.
        missing: The output file that is not.
    """

    said: str
    logs: list[str]
    missing: str


def job(number: str) -> SlurmJob:
    """Return what Slurm knows of a job.

    Raises:
        DoctorError: It is no job's number, or Slurm does not know it.
    """
    if not _NUMBER.fullmatch(number):
        raise DoctorError(
            f"{number} is not a Slurm job number", "such as 4711, or 4711_3 in an array"
        )
    facts = _of_scontrol(number) or _of_sacct(number)
    if not facts:
        raise DoctorError(
            f"Slurm does not know job {number}",
            "scontrol forgets a job minutes after its end (MinJobAge), and sacct needs accounting: "
            "name the job's log files with --log",
        )
    outputs = [path for each in facts for path in _outputs(each)]
    there = [path for path in outputs if path.is_file()]
    logs = dict.fromkeys(map(str, (*there, *_beside(number, outputs))))
    missing = next((str(path) for path in outputs if path not in there), "")
    return SlurmJob("".join(f"{_line(each)}\n" for each in facts), [*logs], missing)


def why_stopped(number: str, timeout: float) -> str:
    """Return why Slurm asks a job's processes to end, in words. Empty if it does not say.

    Args:
        number: The job.
        timeout: Seconds for Slurm's controller to answer.
    """
    # The number of an array's last task is that of the array, and Slurm shows all its tasks.
    every = _of_scontrol(number, timeout)
    facts = next((each for each in every if each.get("JobId") == number), {})
    state, reason = facts.get("JobState", ""), facts.get("Reason", "")
    if facts.get("PreemptTime", "None") != "None" or "PREEMPTED" in state:
        again = ", and starts it again" if facts.get("Requeue") == "1" else ""
        return f"Slurm preempted job {number}: another job takes its place{again}"
    if "TIMEOUT" in state or _reached(facts):
        return f"Slurm ended job {number} at its time limit of {facts.get('TimeLimit')}"
    if "NODE_FAIL" in state or reason == "NodeDown":
        return f"Slurm ended job {number} because a node failed"
    if state in ("CANCELLED", "COMPLETING", "PENDING", "REQUEUED"):
        restarts = facts.get("Restarts", "0")
        if state == "PENDING" or restarts != os.environ.get("SLURM_RESTART_COUNT", "0"):
            return f"Slurm requeued job {number}, as after a preemption: it starts again"
        return f"job {number} was cancelled (scancel)"
    return ""


def _reached(facts: Mapping[str, str]) -> bool:
    """Return whether a job has run for its time limit."""
    times = [_seconds(facts.get(name, "")) for name in ("RunTime", "TimeLimit")]
    return bool(times[0] and times[1]) and times[0] >= times[1]


def _seconds(text: str) -> int:
    """Return ``[days-]hours:minutes:seconds`` in seconds. 0 for ``UNLIMITED`` and other words."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if match is None:
        return 0
    days, hours, minutes, seconds = (int(each or 0) for each in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def _line(facts: Mapping[str, str]) -> str:
    said = " ".join(f"{name}={facts[name]}" for name in _SAID if facts.get(name))
    return f"JobId={facts.get('JobId', '')} {said}"


def _asked(*words: str, timeout: float = TIMEOUT) -> str:
    """Return what a command of Slurm prints. Empty if it fails, or is not installed."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def _of_scontrol(number: str, timeout: float = TIMEOUT) -> list[dict[str, str]]:
    words = ("scontrol", "--oneliner", "show", "job", number)
    lines = _asked(*words, timeout=timeout).splitlines()
    return [dict(_FIELD.findall(line)) for line in lines if line.startswith("JobId=")]


def _of_sacct(number: str) -> list[dict[str, str]]:
    fields = (*_ACCOUNTED, "End", "WorkDir")
    # From Slurm 24.05 on, it also knows the output files.
    for more, option in ((("StdOut", "StdErr"), "--expand-patterns"), ((), "--allocations")):
        wanted = ",".join((*fields, *more))
        text = _asked("sacct", "-X", "-n", "-P", option, "-j", number, "-o", wanted)
        rows = [line.split("|") for line in text.splitlines() if line.count("|") >= len(fields) - 1]
        if rows:
            names = [_NAMES.get(name, name) for name in (*fields, *more)]
            return [dict(zip(names, row, strict=False)) for row in rows]
    return []


def _outputs(facts: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files of a job's output. Slurm's default if they are not known."""
    folder = facts.get("WorkDir", "")
    named = [facts.get(name, "") for name in ("StdOut", "StdErr")]
    default = f"slurm-{facts.get('JobId', '')}.out" if folder else ""
    for name in dict.fromkeys(each for each in (named if any(named) else [default]) if each):
        if name != "/dev/null":
            yield Path(folder, name)


def _beside(number: str, outputs: list[Path]) -> Iterator[Path]:
    """Yield other logs with the job's number in their names, as ``srun --output`` writes them.

    A short number may be a rank. It has to follow the same words as in the job's own output.
    """
    own = re.compile(rf"(?<!\d){re.escape(number)}(?!\d)")
    for output in dict.fromkeys(outputs):
        place = own.search(output.name)
        start = output.name[: place.end()] if place and len(number) < _LONG_NUMBER else ""
        try:
            files = sorted(output.parent.iterdir())
        except OSError:
            continue
        for path in files if place or len(number) >= _LONG_NUMBER else ():
            ours = own.search(path.name) and path.name.startswith(start)
            if ours and _LOG.search(path.name) and path.is_file():
                yield path
