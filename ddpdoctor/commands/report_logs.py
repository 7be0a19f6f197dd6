"""``ddpdoctor report --log`` and ``--slurm``: name the cause of a failure from plain logs."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ddpdoctor.commands.report import complain, print_for_tools, print_lines, text_of
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import count
from ddpdoctor.core.job import Command, OwnOptions
from ddpdoctor.core.options import Given, Selection
from ddpdoctor.failures import verdict
from ddpdoctor.failures.files import is_no_text, log_names, texts_of
from ddpdoctor.failures.lines import Redactor
from ddpdoctor.failures.log import LogReader
from ddpdoctor.failures.occurrences import Occurrence
from ddpdoctor.render import json_lines, reporter
from ddpdoctor.system.proc import pause

_SENT = 25.0  # Seconds for all messages of ``--notify``, including second attempts


def report(given: Given) -> list[Finding]:
    """Report on the logs of one job, or watch those of several."""
    if "--watch" in given:
        return _watch(given)
    if "--slurm" in given:
        return _of_slurm(given)
    if not given.rest:
        raise DoctorError("option --log needs a file", "name the job's log files, or - for stdin")
    return _explained(given, given.rest[0], log_names(given.rest))


def _of_slurm(given: Given) -> list[Finding]:
    from ddpdoctor.failures import slurm

    number = given.get("--slurm")
    job = slurm.job(number)
    if job.missing:
        complain(f"no such file on this machine: {job.missing}")
    logs = [*job.logs, *(log_names(given.rest) if given.rest else ())]
    found = _explained(given, f"job {number}", logs, ("slurm", job.said))
    if not found and "--json" not in given:
        print_lines(f"Slurm: {line}" for line in job.said.splitlines())
    return found


def _watch(given: Given) -> list[Finding]:
    """Report on jobs whose logs have stopped growing, until interrupted."""
    from ddpdoctor.failures import watching

    watch = watching.Watch(given.rest or ["."])
    complain(f"waits for failures in {', '.join(given.rest) or 'this directory'}; Ctrl-C ends it")
    known: dict[str, set[str]] = defaultdict(set)
    try:
        while True:
            for job, paths in watch.settled():
                try:
                    found, _ = _read(given, paths)
                except DoctorError as error:
                    complain(error.message)
                    continue
                chosen = Selection.given(given).of(found)
                news = [each for each in chosen if each.severity > Severity.INFO]
                news = [each for each in news if each.message not in known[job]]
                known[job].update(each.message for each in news)
                if news:
                    if not print_for_tools(given, news, job, lambda _: json_lines.head()):
                        print_lines([f"{job}:"])
                        _print_text(news)
                    _notify(given, job, news)
            pause(watching.POLL)
    except KeyboardInterrupt:
        return []


def _explained(
    given: Given, job: str, paths: Sequence[str], more: tuple[str, str] | None = None
) -> list[Finding]:
    """Print the findings of a job's logs."""
    every, (files, size) = _read(given, paths, more)
    found = Selection.given(given).of(every)
    script = os.path.abspath(paths[0]) if paths else job
    if not print_for_tools(given, found, script, lambda _: json_lines.head()):
        _print_text(found)
        amount = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
        if not every and not size:
            print_lines(["nothing in it: see where the job's output goes"])
        elif not every:
            hang = "if the job hangs: ddpdoctor run, or ddpdoctor stacks"
            print_lines([f"no failure in it; {hang}"])
        counts = reporter.findings_count(found, len(every) - len(found))
        print_lines([f"{counts} in {count(files, 'file')}, {amount}"])
    _notify(given, job, found)
    return found


def _print_text(found: Iterable[Finding]) -> None:
    for finding in found:
        print(text_of(finding, 0.0, None), flush=True)


def _read(
    given: Given, paths: Sequence[str], more: tuple[str, str] | None = None
) -> tuple[list[Finding], tuple[int, int]]:
    """Return all findings of a job's logs, the number of files, and their size in bytes."""
    seen: list[Occurrence] = []
    files = size = 0
    for name, chunks in _opened(paths):
        reader = LogReader(name, files)
        for chunk in chunks:
            if not reader.size and is_no_text(chunk):
                complain(f"{name} does not begin with text")
            reader.feed(chunk)
        seen += reader.close()
        size += reader.size
        files += 1
    if more is not None:
        name, said = more
        reader = LogReader(name, files)
        reader.feed(said.encode())
        seen += reader.close()
    every = verdict.findings(seen)
    if "--redact" in given:
        redactor = Redactor([f"{each.who} {each.text}" for each in seen])
        every = [*map(redactor.finding, every)]
    return every, (files, size)


def _opened(paths: Sequence[str]) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the logs with their names, relative to their common directory."""
    common = os.path.commonpath([os.path.abspath(name) for name in paths]) if paths else ""
    for path in paths:
        for name, chunks in texts_of(path):
            if name == "-":
                yield "stdin", chunks
            else:
                inside = os.path.relpath(os.path.abspath(name), common)
                yield inside if len(paths) > 1 else name, chunks


def _notify(given: Given, job: str, found: Sequence[Finding]) -> None:
    """Send errors to the targets of ``--notify``, and wait until they are sent."""
    targets = given.get("--notify", ())
    if not targets or not found:
        return
    from ddpdoctor.run.reported import Reported
    from ddpdoctor.supervise.notify import Notifications

    own = OwnOptions(notify=tuple(targets))
    sent = Notifications(Command((), own, "", False, script=job), complain)
    sent.news(None, [Reported(number, each, 0) for number, each in enumerate(found, 1)])
    sent.close(_SENT)
