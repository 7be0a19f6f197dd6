"""``ddpdoctor runs``: list the user's runs, and remove old ones."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.core import formatting, opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import json_text, shown
from ddpdoctor.core.opening import integer
from ddpdoctor.core.options import Parser, number
from ddpdoctor.run import rundir

KEPT = 5  # Default of ``--prune``

PARSER = Parser(
    "runs",
    """\
Usage: ddpdoctor runs [OPTIONS]

List your runs, the newest first: how each ended, when it began, what its
records take on disk, and its worst finding.

Options:
  --prune [N]       Remove finished runs except the newest N [default: 5]. A run
                    directory that was chosen with --run-dir is only taken off
                    the list.
  --json            Each run as a line of JSON.
  -h, --help        Show this text.

`ddpdoctor report RUN` shows a run's findings, `ddpdoctor compare RUN RUN` what
differs between two. `ddpdoctor run` itself keeps the newest 20.

Exit status: 0; 2 if the runs cannot be listed or removed.
""",
    {"--prune": number()._replace(omitted=KEPT)},
)


@dataclass(frozen=True)
class _Entry:
    """A run in the list."""

    path: Path
    status: str
    started: float  # Unix time in seconds; 0 if unknown
    size: int  # Bytes
    verdict: str


def main(words: Sequence[str]) -> int:
    """List runs, or remove old ones."""
    given = PARSER.read(words)
    if given.rest:
        raise PARSER.wrong(f"runs takes no run: {given.rest[0]}", "`ddpdoctor report RUN` shows it")
    try:
        if "--prune" in given:
            return _prune(given.get("--prune"))
        entries = []
        for path in rundir.newest_first():
            try:
                manifest = opening.json_object(path / rundir.MANIFEST, opening.MOST_MANIFEST)
            except (OSError, ValueError):
                manifest = {}
            status, verdict = _outcome(path)
            started = integer(manifest, "started") / 1e9
            entries.append(_Entry(path, status, started, _size(path), verdict))
    except OSError as error:
        raise PARSER.wrong(f"the runs cannot be listed: {error}") from None
    if "--json" in given:
        from ddpdoctor.render.json_lines import FORMAT

        for each in entries:
            print(
                json_text(
                    {
                        "format": FORMAT,
                        "run": each.path.name,
                        "path": str(each.path.resolve()),
                        "status": each.status,
                        "started": each.started or None,
                        "bytes": each.size,
                        "verdict": each.verdict or None,
                    }
                )
            )
    else:
        for line in _lines(entries):
            print(shown(line))
    return 0


def _prune(kept: int) -> int:
    removed, freed = 0, 0
    finished = [path for path in rundir.newest_first() if not rundir.is_live(path)]
    for path in finished[kept:]:
        size = 0 if path.is_symlink() else _size(path)
        try:
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)
        except OSError as error:
            raise DoctorError(f"cannot remove {path}: {error.strerror}") from None
        removed, freed = removed + 1, freed + size
    amount = f", {formatting.size(freed)}" if freed else ""
    print(f"removed {formatting.count(removed, 'run')}{amount}; kept {min(kept, len(finished))}")
    return 0


def _outcome(path: Path) -> tuple[str, str]:
    """Return how a run ended, and its worst finding, from the supervisor's journal alone."""
    from ddpdoctor.core.finding import Severity
    from ddpdoctor.run.reader import JournalReader
    from ddpdoctor.run.records.supervisor import HangOverRecord, HangRecord, JobRecord, SignalRecord
    from ddpdoctor.run.records.typed_json import SUPERVISOR_RECORDS
    from ddpdoctor.run.reported import standing

    reader = JournalReader(path / "supervisor.jsonl", kinds=SUPERVISOR_RECORDS)
    reader.poll()
    records = reader.records
    found = sorted((finding for finding, _ in standing(records)), key=lambda each: -each.severity)
    worst = next((each for each in found if each.severity > Severity.INFO), None)
    verdict = f"{worst.code} {worst.message}" if worst is not None else ""
    if ended := [each.status for each in records.of(JobRecord)]:
        last = ended[-1]
        if any(each.hang for each in records.of(SignalRecord)):
            return "hung", verdict
        if last is not None and last < 0:
            from ddpdoctor.diagnose.crashes.rank_endings import signal_name

            return signal_name(-last), verdict
        return "succeeded" if last == 0 else f"failed ({last})", verdict
    if not rundir.is_live(path):
        return "killed", verdict
    hangs = [each for each in records if isinstance(each, (HangRecord, HangOverRecord))]
    return ("hung" if hangs and isinstance(hangs[-1], HangRecord) else "running"), verdict


def _size(path: Path) -> int:
    total = 0
    with os.scandir(path) as files:
        for each in files:
            if each.is_file(follow_symlinks=False):
                total += each.stat(follow_symlinks=False).st_size
    return total


def _lines(entries: Sequence[_Entry]) -> Iterator[str]:
    if not entries:
        yield "there is no run yet; `ddpdoctor run` starts one"
        return
    names = max(len("run"), *(len(each.path.name) for each in entries))
    states = max(len("status"), *(len(each.status) for each in entries))
    yield f"{'run':<{names}}  {'status':<{states}}  {'age':>4}  {'size':>5}  verdict"
    now = time.time()
    room = max(20, shutil.get_terminal_size((0, 0)).columns - names - states - 17)
    on_terminal = sys.stdout.isatty()
    for each in entries:
        age = formatting.age(now - each.started) if each.started else formatting.MISSING
        verdict = " ".join(each.verdict.split()) or "-"
        if on_terminal and len(verdict) > room:
            verdict = f"{verdict[: room - 3]}..."
        yield (
            f"{each.path.name:<{names}}  {each.status:<{states}}  {age:>4}  "
            f"{formatting.size(each.size):>5}  {verdict}"
        )
