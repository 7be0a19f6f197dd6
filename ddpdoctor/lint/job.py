"""Check the code of a job while it starts, within a fixed budget."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from ddpdoctor.core.errors import Faults
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.opening import relative_path
from ddpdoctor.diagnose.source_files import imported_files

MAX_SOURCE = 128 << 10
"""Bytes of code that are read: the script, then the files that it imports."""


def sources(script: str) -> list[str]:
    """Return a script and the files beside it that it imports, within `MAX_SOURCE`."""
    found, left = [script], MAX_SOURCE - os.path.getsize(script)
    for path in found:
        for each in imported_files(path):
            size = os.path.getsize(each)
            if each not in found and size <= left:
                found.append(each)
                left -= size
    return found if left >= 0 else []


def problems(script: str, faults: Faults | None = None) -> list[Finding]:
    """Return the warnings and errors in a script. Empty for a script that does not parse.

    Args:
        script: The file.
        faults: Reports rules that fail. By default on stderr.
    """
    # Imported here, since most of the time is theirs.
    from ddpdoctor.core.user_code import Location
    from ddpdoctor.lint import files
    from ddpdoctor.lint.check import UNREADABLE, check

    found = check([files.read(each) for each in sources(script)], faults)
    return [
        Finding(
            each.code,
            each.severity,
            each.message,
            location=Location(os.path.abspath(each.path), each.line),
            fix=each.fix,
        )
        for each in found
        if each.severity >= Severity.WARNING and each.code != UNREADABLE
    ]


def errors(script: str) -> list[Finding]:
    """Return the errors in a script."""
    return [each for each in problems(script) if each.severity is Severity.ERROR]


def placed(found: Sequence[Finding], in_code: Sequence[Finding]) -> list[Finding]:
    """Add the lines of code with the same fault to the evidence of a run's findings."""
    lines: dict[str, list[str]] = {}
    for each in in_code:
        lines.setdefault(each.code, []).append(place_of(each))
    return [
        replace(each, evidence=(*each.evidence, f"seen in the code: {', '.join(places[:3])}"))
        if (places := lines.get(each.code)) and place_of(each) not in places
        else each
        for each in found
    ]


def of_run(script: str, since: int, faults: Faults) -> list[Finding]:
    """Return the problems in a finished run's script, if its files did not change since then.

    Args:
        script: The file.
        since: When the run began, in Unix nanoseconds.
        faults: Reports rules that fail.
    """
    if not os.path.isfile(script):
        return []
    changed = any(os.stat(each).st_mtime_ns > since for each in sources(script))
    return [] if changed else problems(script, faults)


def script_of(words: Sequence[str]) -> str | None:
    """Return the Python file that a command line starts. None if it names no such file."""
    for at, word in enumerate(words):
        path = word
        if at and words[at - 1] in ("-m", "--module"):
            path = word.replace(".", os.sep) + ".py"
        if path.endswith(".py") and os.path.isfile(path):
            return path
    return None


def place_of(finding: Finding) -> str:
    """Return the place of a finding relative to the working directory: ``train.py:31``."""
    location = finding.location
    return f"{relative_path(location.path)}:{location.line}" if location is not None else ""


class SourceCheck:
    """A check of a job's script, in a thread while the job starts.

    It never raises, and the job does not wait for it.

    Args:
        words: The job's command line.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._found: list[Finding] = []
        self.remarks: deque[str] = deque()  # Lines about failures of the check itself
        self._reported = False
        self._thread = threading.Thread(target=self._run, args=(tuple(words),), daemon=True)
        self._thread.start()

    def _run(self, words: tuple[str, ...]) -> None:
        faults = Faults(self.remarks.append)

        def look() -> list[Finding]:
            script = script_of(words)
            return problems(script, faults) if script is not None else []

        self._found = faults.guarded("the check of the job's code", look) or []

    def news(self, timeout: float = 0.0) -> list[Finding]:
        """Return the errors of the check once. Wait at most ``timeout`` seconds for its end."""
        if timeout:
            self._thread.join(timeout)
        if self._reported or self._thread.is_alive():
            return []
        self._reported = True
        return [each for each in self._found if each.severity is Severity.ERROR]

    def placed(self, found: Sequence[Finding]) -> list[Finding]:
        """Add the lines of code with the same fault to the evidence of a run's findings."""
        return placed(found, self._found if self._reported else ())
