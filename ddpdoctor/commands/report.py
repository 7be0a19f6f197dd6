"""``ddpdoctor report``: what was wrong with a run that is over, or with a job that left a log."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddpdoctor.core.control_characters import shown
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.faults import Faults
from ddpdoctor.core.finding import RULES, Finding, Severity, examine
from ddpdoctor.failures import sources, verdict
from ddpdoctor.failures.log import Sighting, read
from ddpdoctor.render import console, json_lines, problems, summary, terminal
from ddpdoctor.render.report import script
from ddpdoctor.run import rundir
from ddpdoctor.run.record import integer
from ddpdoctor.run.reported import with_kept
from ddpdoctor.run.snapshot import Run, RunReader
from ddpdoctor.supervise import tracebacks

HELP = """\
Usage: ddpdoctor report [OPTIONS] [RUN]
       ddpdoctor report [OPTIONS] --log FILE...

Say again what was found in a run, or name the cause of a failure from the
plain log of a job that ran without ddpdoctor.

RUN is a run's id, its directory, or a copy of it from another machine
[default: your newest run that is over]. FILE is a log, also a compressed one
(gzip), a directory such as torchrun's --log-dir, or - for standard input; name
all files of one job together, one per rank or one for all.

Options:
  --log             Read plain logs in place of a run directory.
  --json            Each finding as a line of JSON, as `run --json` writes them.
  --output FORMAT   text, or problems: findings as lines that an editor's problem
                    matcher understands (path:line:col: severity CODE message).
  --wait SECONDS    Wait so long for the end of a run that lives [default: 0].
  -h, --help        Show this text.

A copied directory gives the same report as on its own machine, without the lines of
code around it where the sources are not the same.

Exit status: 0 nothing but infos; 1 warnings; 2 errors; 3 there is no such run
or file, or it cannot be read.
"""

UNREADABLE = 3
"""Exit status where there is nothing to report on."""

_FLAGS = ("--log", "--json", "--output", "--wait", "--help", "-h")
_FORMATS = ("text", "problems")
_OF_A_RUN = ("rank-*.status", "rank-*.jsonl", "supervisor.jsonl", "process-*.jsonl")


@dataclass
class _Options:
    names: list[str] = field(default_factory=list)
    log: bool = False
    json: bool = False
    output: str = "text"
    wait: float = 0.0
    help: bool = False


def main(words: Sequence[str]) -> int:
    """Report on a run, or on logs.

    Raises:
        DoctorError: There is no such run or file.
    """
    options = _parse(words)
    if options.help:
        sys.stdout.write(HELP)
        return 0
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    found = _of_logs(options) if options.log else _of_run(options)
    worst = max((finding.severity for finding in found), default=Severity.INFO)
    return {Severity.ERROR: 2, Severity.WARNING: 1}.get(worst, 0)


def _parse(words: Sequence[str]) -> _Options:
    options, queue = _Options(), list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if word == "--log":
            options.log = True
        elif word == "--json":
            options.json = True
        elif word in ("-h", "--help"):
            options.help = True
        elif name == "--output":
            if not equals:
                value = queue.pop(0) if queue else ""
            if value not in _FORMATS:
                raise _wrong(f"option --output needs text or problems, not {value!r}")
            options.output = value
        elif name == "--wait":
            if not equals:
                value = queue.pop(0) if queue else ""
            options.wait = _seconds(value)
        elif word == "--":
            options.names += queue
            break
        elif word.startswith("-") and word != "-":
            close = difflib.get_close_matches(name, _FLAGS, n=1)
            raise _wrong(
                f"unknown option {name}",
                f"did you mean {close[0]}?" if close else "`ddpdoctor report --help` says more",
            )
        else:
            options.names.append(word)
    if not options.help:
        _check(options)
    return options


def _seconds(text: str) -> float:
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise _wrong(f"option --wait needs a number of seconds, not {text!r}")
    return float(text)


def _check(options: _Options) -> None:
    if options.log and not options.names:
        raise _wrong("option --log needs a file", "name the job's log files, or - for stdin")
    if not options.log and len(options.names) > 1:
        raise _wrong("report takes one run", "for plain logs: ddpdoctor report --log FILE...")


def _wrong(message: str, hint: str = "") -> DoctorError:
    return DoctorError(message, hint, UNREADABLE)


# -- a run


def _of_run(options: _Options) -> list[Finding]:
    path, remark = _chosen(options.names[0] if options.names else None)
    import ddpdoctor.rules  # noqa: F401 (registers the rules; not before they are needed)

    deadline = time.monotonic() + options.wait
    while rundir.is_live(path) and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        run = RunReader(path, lenient=True).snapshot()
    except OSError as error:
        raise _wrong(f"cannot read {path}: {error.strerror}") from None
    except DoctorError as error:
        raise _wrong(error.message, error.hint) from None
    live = rundir.is_live(path)
    if not live and run.exit_status is None:
        remark = "its supervisor was ended before the job was over, so how it ended is not known"
        run = replace(run, taken=_last_sign(run))
    failed: list[tuple[str, Exception]] = []
    faults = Faults(_complain, "all other rules are applied")
    rules = RULES.values()
    found = examine(run, rules, failed=lambda rule, error: failed.append((rule.code, error)))
    found = faults.guarded("what was said before", with_kept, found, run) or found
    faults.failed(failed)
    if options.json:
        _print(json_lines.line(finding) for finding in found)
        return found
    if options.output == "problems":
        _print(problems.line(finding, script(run)) for finding in found)
        return found
    for finding in found:
        text = faults.guarded(f"the text of {finding.code}", _text_of_run, run, finding)
        print(text or shown(f"{finding.severity.label} {finding.code}: {finding.message}"))
    _print(faults.guarded("the summary", lambda: list(summary.lines(run))) or ())
    _print([remark] if remark else [])
    if live:
        _print(["it lives: this is how it stands now"])
    _print([f"{summary.count(found)}; records in {run.path}"])
    return found


def _chosen(name: str | None) -> tuple[Path, str]:
    """The directory to report on, and a remark about it."""
    if name is None:
        try:
            over, live = rundir.finished(), rundir.live()
        except OSError as error:
            raise _wrong(f"the runs cannot be listed: {error}") from None
        if over:
            return over[0], ""
        if live:
            return live[0], "no run of yours is over yet"
        raise _wrong("there is no run yet", "`ddpdoctor run` starts one; --log FILE reads a log")
    given = Path(name)
    path = next((each for each in rundir.places(name) if each.exists()), given)
    if path.is_file():
        raise _wrong(f"{name} is a file, not a run directory", f"ddpdoctor report --log {name}")
    if not path.is_dir():
        raise _wrong(f"no run named {name}", f"runs are kept in {rundir.base_directory()}")
    path = path.resolve()
    if (path / rundir.MANIFEST).exists() or any(any(path.glob(each)) for each in _OF_A_RUN):
        return path, ""
    raise _wrong(
        f"{name} is not a run directory: it has no {rundir.MANIFEST}",
        "name a directory that `ddpdoctor run` printed, or logs with --log",
    )


def _last_sign(run: Run) -> int:
    """Unix nanoseconds of the last thing that was written; a dead job waits for nobody."""
    times = [integer(record, "time") for record in run.supervisor]
    for rank in run.ranks:
        if rank.status is not None:
            times += [rank.status.since, rank.status.beat or 0]
        times += [integer(record, "time") for record in rank.records[-20:]]
    return max(times, default=run.taken)


# -- logs


def _of_logs(options: _Options) -> list[Finding]:
    names = sources.logs(options.names, UNREADABLE)
    sightings: list[Sighting] = []
    size = 0
    common = os.path.commonpath([os.path.abspath(name) for name in names]) if names else ""
    for place, name in enumerate(names):
        counted = _Counted()
        shown = "stdin" if name == "-" else name
        if len(names) > 1 and name != "-":
            shown = os.path.relpath(os.path.abspath(name), common)
        sightings += read(shown, counted.through(sources.chunks(name, UNREADABLE)), place)
        size += counted.size
    found = verdict.findings(sightings)
    if options.json:
        _print(json_lines.line(finding) for finding in found)
        return found
    if options.output == "problems":
        _print(problems.line(finding, os.path.abspath(names[0])) for finding in found)
        return found
    for finding in found:
        print(_text(finding, 0.0, None))
    files = f"{len(names)} file{'' if len(names) == 1 else 's'}, {_size(size)}"
    _print([f"{summary.count(found)} in {files}"])
    return found


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


@dataclass
class _Counted:
    size: int = 0

    def through(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The pieces, as they are counted."""
        for piece in pieces:
            self.size += len(piece)
            yield piece


# -- output


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(shown(line))


def _complain(text: str) -> None:
    print(f"ddpdoctor: {shown(text)}", file=sys.stderr)


def _text_of_run(run: Run, finding: Finding) -> str:
    return _text(finding, console.written_before(run), tracebacks.kept(run, finding))


def _text(finding: Finding, written: float, kept: Path | None) -> str:
    return console.render(
        finding,
        colour=terminal.wants_colour(1),
        width=terminal.width(1) or 100,
        written=written,
        kept=kept,
    )
