"""``ddpdoctor report``: show a finished run, compare two, or diagnose a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpdoctor.core.errors import DoctorError, Faults
from ddpdoctor.core.finding import RULES, Finding, Severity, examine
from ddpdoctor.core.formatting import named, shown
from ddpdoctor.core.opening import as_copy
from ddpdoctor.core.options import (
    CODES,
    DIRECTORY,
    FILE,
    LOG_TO,
    NOTIFY,
    OUTPUT,
    Given,
    Parser,
    Selection,
    seconds,
    text,
)
from ddpdoctor.lint import job
from ddpdoctor.render import console, json_lines, reporter, terminal
from ddpdoctor.render.reporter import job_script, line_format
from ddpdoctor.run import rundir
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.reported import kept_traceback, with_kept
from ddpdoctor.run.snapshot import Run

# -- ``ddpdoctor report``: show the findings of a finished run, or of a job's log


UNREADABLE = 3  # Exit status if there is nothing to report on

_OF_A_RUN = ("rank-*.status", "rank-*.jsonl", "supervisor.jsonl", "process-*.jsonl")


PARSER = Parser(
    "report",
    """\
Usage: ddpdoctor report [OPTIONS] [RUN]
       ddpdoctor report [OPTIONS] RUN RUN
       ddpdoctor report [OPTIONS] --log FILE...
       ddpdoctor report [OPTIONS] --log --watch DIR...
       ddpdoctor report [OPTIONS] --slurm JOBID [FILE...]
       ddpdoctor report [OPTIONS] --flight DIR...

Show the findings of a finished run, compare two runs, or name the cause of a
failure from the plain log of a job that ran without ddpdoctor, or of a hang
from the files that torch's Flight Recorder wrote.

RUN is a run's id, its directory, or a copy of it from another machine
[default: your newest finished run]. FILE is a log, also a compressed one or an
archive (gzip, zip, tar, xz, zstd), a directory such as torchrun's --log-dir, or
- for standard input; name all files of one job together, one per rank or one
for all. DIR is where TORCH_FR_DUMP_TEMP_FILE points to, with one file per rank;
name the directories, or the files, of all nodes together.

Options:
  --html FILE       Write the report with its charts into one HTML file instead
                    of printing it; needs no network, opens from disk or by mail.
  --trace FILE      Write a timeline of all ranks for ui.perfetto.dev instead;
                    compressed if FILE ends in .gz.
  --with DIR        Merge traces of torch.profiler in DIR into that timeline.
  --log             Read plain logs in place of a run directory.
  --watch           With --log: wait until logs in DIR are written and come to
                    rest, and report on each job that failed, until Ctrl-C.
                    A job is a directory in DIR, or files with one number of
                    three digits in their names, or one name but for the rank.
  --slurm JOBID     Read what Slurm says of a job, and the job's logs.
  --notify URL|CMD  With --log or --slurm: send errors to a webhook or a shell
                    command, as `run --notify` does; may be repeated.
  --log-to TARGET   Send the run to an experiment tracker, as `run --log-to` does.
  --flight          Read files of torch's Flight Recorder in place of one.
  --redact          With --log and --slurm: leave out host and user names, addresses and
                    tokens, so that the result can be posted. Read it once more.
  --json            Each finding as a line of JSON, as `run --json` writes them.
  --output FORMAT   text; problems: findings as lines that an editor's problem
                    matcher understands (path:line:col: severity CODE message);
                    github: as annotations of GitHub Actions.
  --select CODES    Report these findings alone: codes, or how they begin, such
                    as DDP4,DDP901.
  --ignore CODES    Do not report these.
  --wait SECONDS    Wait so long for the end of a live run [default: 0].
  --workspace DIR   Choose among the runs of this folder, for an editor: your
                    newest finished one, or with `latest` the newest.
  --exit-zero       Exit with 0 whatever is found.
  -h, --help        Show this text.

A copied directory gives the same report as on its own machine, without the
source lines where the sources differ.

Exit status: 0 nothing but infos; 1 warnings; 2 errors; 3 there is no such run
or file, or it cannot be read.
""",
    {
        "--output": OUTPUT,
        "--slurm": text("the number of a job"),
        "--notify": NOTIFY,
        "--log-to": LOG_TO,
        "--select": CODES,
        "--ignore": CODES,
        "--wait": seconds(),
        "--html": FILE,
        "--trace": FILE,
        "--with": DIRECTORY,
        "--workspace": DIRECTORY,
    },
    status=UNREADABLE,
)


def main(words: Sequence[str]) -> int:
    """Report on a run, or on logs."""
    given = PARSER.read(words)
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        _check(given)
        if "--log" in given or "--slurm" in given:
            from ddpdoctor.commands import report_logs

            found = report_logs.report(given)
        elif "--flight" in given:
            found = _report_flight(given)
        elif len(given.rest) == 2:
            from ddpdoctor.commands import compare

            return compare.report(given.rest, json="--json" in given)
        else:
            found = _report_run(given)
    except DoctorError as error:
        raise PARSER.wrong(error.message, error.hint) from None
    if "--exit-zero" in given:
        return 0
    worst = max((finding.severity for finding in found), default=Severity.INFO)
    return {Severity.ERROR: 2, Severity.WARNING: 1}.get(worst, 0)


def _check(given: Given) -> None:
    """Refuse options that exclude each other."""
    if "--with" in given and "--trace" not in given:
        raise DoctorError("--with needs --trace", "--trace FILE is what the traces are merged into")
    if "--log" in given and "--flight" in given:
        raise DoctorError("--log and --flight do not go together", "report on each separately")
    of_logs = "--log" in given or "--slurm" in given
    for option in ("--redact", "--notify"):
        if option in given and not of_logs:
            raise DoctorError(
                f"{option} is for logs", f"ddpdoctor report {option} ... --log FILE..."
            )
    if "--watch" in given and ("--log" not in given or "--slurm" in given):
        raise DoctorError("--watch is for logs", "ddpdoctor report --log --watch DIR...")
    for option in ("--html", "--trace", "--log-to"):
        if option in given and (of_logs or "--flight" in given):
            raise DoctorError(f"{option} needs a run directory", "`ddpdoctor run` writes one")
        if option in given and len(given.rest) > 1:
            raise DoctorError(f"{option} takes one run", "name one run")


# -- a run


def _report_run(given: Given) -> list[Finding]:
    if len(given.rest) > 1:
        raise DoctorError(
            "report takes one run, or two to compare",
            "for plain logs: ddpdoctor report --log FILE...",
        )
    path, remark = chosen(given.rest[0] if given.rest else None, given.get("--workspace"))
    foreign = is_foreign(path)
    import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)

    deadline = time.monotonic() + given.get("--wait", 0.0)
    while rundir.is_live(path) and time.monotonic() < deadline:
        time.sleep(0.1)
    run = snapshot(path)
    live = rundir.is_live(path)
    if not live and run.exit_status is None:
        if not foreign:
            remark = (
                "the supervisor was killed before the job ended, so how the job ended is unknown"
            )
        run = replace(run, taken=run.last_sign)
    failed: list[tuple[str, Exception]] = []
    faults = Faults(complain, "all other rules are applied")
    found = examine(
        run, RULES.values(), failed=lambda rule, error: failed.append((rule.code, error))
    )
    every = faults.guarded("the findings of the live run", with_kept, found, run) or found
    in_code = faults.guarded(
        "the check of the job's code", job.of_run, job_script(run), run.started_at, faults
    )
    every = job.placed(every, in_code or ())
    found = Selection.given(given).of(every)
    faults.failed(failed)
    files = _write_files(given, run, found, live, remark, faults)
    if "--log-to" in given:
        from ddpdoctor.trackers.follow import send_finished

        send_finished(path, given.get("--log-to"), complain)
    if print_for_tools(given, found, job_script(run), lambda each: json_lines.head_of(each, run)):
        # Standard output is reserved for the tool that reads it.
        for file in files:
            complain(file)
        return found
    counts = reporter.findings_count(found, len(every) - len(found))
    if files:
        print_lines(f"{file}; {counts}" for file in files)
        return found
    before = console.written_before(run)

    def one(each: Finding) -> str:
        return text_of(each, before, kept_traceback(run, each))

    for finding in found:
        part = f"the text of {finding.code}"
        text = faults.guarded(part, one, finding)
        print(text or shown(f"{finding.severity.label} {finding.code}: {finding.message}"))
    print_lines(faults.guarded("the summary", lambda: list(reporter.summary_lines(run))) or ())
    print_lines([remark] if remark else [])
    if live:
        print_lines(["the run is live; these are the findings so far"])
    print_lines([f"{counts}; records in {run.path}"])
    return found


def snapshot(path: Path) -> Run:
    """Read a run directory.

    Raises:
        DoctorError: It cannot be read.
    """
    try:
        return RunReader(path, lenient=True).snapshot()
    except OSError as error:
        raise DoctorError(f"cannot read {path}: {error.strerror}") from None


def _write_files(
    given: Given, run: Run, found: Sequence[Finding], live: bool, remark: str, faults: Faults
) -> list[str]:
    """Write the files for ``--html`` and ``--trace``. Return a line about each."""
    written = []
    if "--html" in given:
        from ddpdoctor.render.html.page import page, report_content

        def html(path: str) -> int:
            data = page(report_content(run, found, live=live, remark=remark)).encode()
            return Path(path).write_bytes(data)

        written.append(_write(given.get("--html"), faults, "the HTML report", html))
    if "--trace" in given:
        from ddpdoctor.render import chrome_trace

        name, folder = given.get("--trace"), given.get("--with")
        profiles = [] if folder is None else chrome_trace.read_profiles(folder, run)

        def events(path: str) -> int:
            return chrome_trace.write_trace(path, run, found, profiles, name.endswith(".gz"))

        written.append(_write(name, faults, "the trace", events))
    return written


def _write(name: str, faults: Faults, part: str, write: Callable[[str], int]) -> str:
    """Write a file. Return its name and size, in words.

    Raises:
        DoctorError: The file cannot be written, or its content cannot be generated.
    """
    try:
        open(name, "wb").close()
    except OSError as error:
        raise DoctorError(f"cannot write {name}: {error.strerror}") from None
    size = faults.guarded(part, write, name)
    if size is None:
        raise DoctorError(f"{name} is not complete")
    return f"wrote {name}, {size / 1e6:.1f} MB"


def chosen(name: str | None, folder: str | None = None) -> tuple[Path, str]:
    """Return the directory to report on, and a remark about it."""
    if name is None or (name == rundir.LATEST and folder is not None):
        try:
            runs = [entry.resolve() for entry in rundir.newest_first(folder)]
        except OSError as error:
            raise DoctorError(f"the runs cannot be listed: {error}") from None
        over = next((path for path in runs if name is not None or not rundir.is_live(path)), None)
        if over is not None:
            return over, ""
        if runs:
            return runs[0], "none of your runs has finished yet"
        raise DoctorError(
            "there is no run yet" if folder is None else f"there is no run of {folder} yet",
            "`ddpdoctor run` starts one; --log FILE reads a log",
        )
    if folder is not None:
        raise DoctorError("--workspace chooses a run, and so does its name", "leave one out")
    path = next((each for each in rundir.places(name) if _is_there(each)), None)
    if path is None:
        raise DoctorError(f"no run named {name}", f"runs are kept in {rundir.base_directory()}")
    if path.is_file():
        raise DoctorError(
            f"{name} is a file, not a run directory", f"ddpdoctor report --log {name}"
        )
    path = path.resolve()
    if _is_there(path / rundir.MANIFEST) or any(any(path.glob(each)) for each in _OF_A_RUN):
        return path, ""
    raise DoctorError(
        f"{name} is not a run directory: it has no {rundir.MANIFEST}",
        "name a directory that `ddpdoctor run` printed, or logs with --log",
    )


def _is_there(path: Path) -> bool:
    """Return whether a path exists.

    Raises:
        DoctorError: This user has no permission to check.
    """
    try:
        path.stat()
    except PermissionError:
        raise rundir.unreadable(path) from None
    except (OSError, ValueError):
        return False
    return True


def is_foreign(path: Path) -> bool:
    """Print a remark if a run is another user's. Return whether it is."""
    if remark := as_copy(path):
        complain(remark)
    return bool(remark)


# -- print findings as text, or as lines for tools


def print_for_tools(
    given: Given, found: Iterable[Finding], script: str, head: Callable[[Finding], dict[str, Any]]
) -> bool:
    """Print findings in the requested format unless it is text. Return whether it is not."""
    one = line_format(given.get("--output", "text"))
    if "--json" in given:
        print_lines(json_lines.line(finding, head(finding)) for finding in found)
    elif one is not None:
        print_lines(one.line(finding, script) for finding in found)
    return "--json" in given or one is not None


def print_lines(lines: Iterable[str]) -> None:
    """Print lines without control characters."""
    for line in lines:
        print(shown(line))


def complain(text: str) -> None:
    """Print a remark on standard error."""
    print(f"ddpdoctor: {shown(text)}", file=sys.stderr)


def text_of(finding: Finding, written: float, kept: Path | None) -> str:
    """Return a finding as text for the terminal."""
    return console.render(
        finding,
        colour=terminal.wants_colour(1),
        width=terminal.width(1),
        written=written,
        kept=kept,
    )


# -- files of torch's Flight Recorder


def _report_flight(given: Given) -> list[Finding]:
    if not given.rest:
        raise DoctorError(
            "option --flight needs a directory", "name where TORCH_FR_DUMP_TEMP_FILE points to"
        )
    import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
    from ddpdoctor.diagnose.hangs import flight_dumps

    dumps = flight_dumps.read(given.rest)
    for line in dumps.trouble:
        complain(line)
    every = [each for each in examine(dumps.run, RULES.values()) if dumps.proves(each.code)]
    found = Selection.given(given).of(every)
    if print_for_tools(given, found, "", lambda _: json_lines.head()):
        return found
    for finding in found:
        print(text_of(finding, 0.0, None))
    print_lines([dumps.remark] if dumps.remark and not every else [])
    left = f"; {named(dumps.missing)} left none" if dumps.missing else ""
    counts = reporter.findings_count(found, len(every) - len(found))
    print_lines([f"{counts} in the files of {named(dumps.ranks)}{left}"])
    return found
