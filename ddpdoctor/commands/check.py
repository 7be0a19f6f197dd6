"""``ddpdoctor check``: check whether a job can run here, and print the results."""

from __future__ import annotations

import io
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, TextIO

import ddpdoctor.preflight  # noqa: F401 (registers the checks)
from ddpdoctor.core import formatting, opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import count, json_text, shown
from ddpdoctor.preflight import command_lines
from ddpdoctor.preflight.check import CHECKS, Check, Outcome, Status, outcome_record, run_checks
from ddpdoctor.preflight.machine import resources
from ddpdoctor.preflight.nodes.attendance import (
    excluded_nodes,
    next_line,
    open_words,
    verdict_records,
)
from ddpdoctor.preflight.situation import Deadline, Situation, gpu_facts, node_place, places
from ddpdoctor.render import terminal
from ddpdoctor.render.json_lines import FORMAT
from ddpdoctor.render.terminal import UNWRAPPED, StatusLine, style_of

# -- print the results of preflight checks for a person: progress, table, findings, summary


_STYLES = {
    Status.PASS: "ok",
    Status.WARN: "warning",
    Status.FAIL: "error",
    Status.SKIPPED: "dim",
    Status.COULD_NOT_RUN: "other",
}
_NAME, _STATUS, _MIN_DETAIL = 18, 7, 24
"""Columns of a check's name, of its status, and of its details at least."""


def result_table(outcomes: Sequence[Outcome], *, colour: bool, width: int | None) -> str:
    """Return a line for each check: its name, how it ended, and what was really tested.

    Without a width, as in a pipe, nothing is wrapped.
    """
    lines = []
    room = max(_MIN_DETAIL, (width or UNWRAPPED) - _NAME - _STATUS - 2)
    for outcome in outcomes:
        status = outcome.status
        word = "unknown" if status is Status.COULD_NOT_RUN else status.value
        word = word.ljust(_STATUS)
        if colour:
            word = style_of(_STYLES[status]).render(word)
        details = textwrap.wrap(shown(outcome.detail, "\n\t"), room, break_on_hyphens=False) or [""]
        lines.append(f"{outcome.check:<{_NAME}} {word} {details[0]}".rstrip())
        lines += [f"{'':<{_NAME + _STATUS + 2}}{each}" for each in details[1:]]
    return "".join(f"{line}\n" for line in lines)


def finding_blocks(outcomes: Sequence[Outcome], *, colour: bool, width: int | None) -> str:
    """Return all findings, the worst first, with an empty line before each."""
    found = [finding for outcome in outcomes for finding in outcome.findings]
    found.sort(key=lambda finding: (-finding.severity, finding.code))
    if not found:
        return ""
    # Imported here, since most checks find nothing.
    from ddpdoctor.render import console

    return "".join("\n" + console.render(finding, colour=colour, width=width) for finding in found)


def summary_line(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Count how checks ended: ``12 checks in 1.4 s: 11 passed, 1 skipped``."""
    words = {
        Status.FAIL: "failed",
        Status.WARN: "warned",
        Status.COULD_NOT_RUN: "could not run",
        Status.SKIPPED: "skipped",
        Status.PASS: "passed",
    }
    counts = [
        f"{count} {word}"
        for status, word in words.items()
        if (count := sum(outcome.status is status for outcome in outcomes))
    ]
    return f"{formatting.count(len(outcomes), 'check')} in {seconds:.1f} s: {', '.join(counts)}"


def json_document(
    outcomes: Sequence[Outcome],
    host: str,
    exit_status: int,
    seconds: float,
    *,
    nodes: Sequence[Mapping[str, Any]] = (),
    exclude: Sequence[str] = (),
) -> str:
    """Return all outcomes as one JSON object.

    Args:
        outcomes: Of the checks.
        host: This machine's name.
        exit_status: Of the command.
        seconds: How long all of it took.
        nodes: The nodes that met, with what their own checks found.
        exclude: The host names of nodes that a job should not use.
    """
    return json_text(
        {
            "format": FORMAT,
            "host": host,
            "exit_status": exit_status,
            "seconds": round(seconds, 3),
            "nodes": list(nodes),
            "exclude": list(exclude),
            "checks": [outcome_record(outcome) for outcome in outcomes],
        },
        indent=2,
    )


class Progress(StatusLine):
    """A line on a terminal with the checks that are still running. Elsewhere it shows nothing.

    Args:
        names: The checks that were started.
        row: Prints the result of a check that ended.
        stream: The output.
    """

    def __init__(
        self,
        names: Sequence[str],
        row: Callable[[Outcome], None] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        super().__init__(stream)
        self._row = row
        self._running = list(names)
        self._total = len(self._running)
        self._count()

    def seen(self, outcome: Outcome) -> None:
        """Note that a check ended."""
        if outcome.check in self._running:
            self._running.remove(outcome.check)
        row = self._row
        if row is not None:
            self.aside(lambda: row(outcome))
        self._count()

    def _count(self) -> None:
        done = self._total - len(self._running)
        self.show(f"{done} of {self._total} checks done; running: {', '.join(self._running)}")


# -- ``ddpdoctor check``: can a job start, communicate and run here?


WARNED, FAILED, NOT_TESTED = 1, 2, 4
"""Bits of the exit status: the worse of the first two, and the third one separately, so that a
scheduler can distinguish a broken node from one that had no time."""

WRONG_USAGE = 3

PARSER = command_lines.PARSER


def main(words: Sequence[str]) -> int:
    """Check this machine, and the other nodes if there are any."""
    try:
        asked = command_lines.parse(words)
        chosen = command_lines.choose(asked, CHECKS)
    except DoctorError as error:
        raise DoctorError(error.message, error.hint, status=WRONG_USAGE) from None
    if asked.list:
        _list(chosen)
        return 0
    if any(place.local_rank for place in places(os.environ) if place.launcher != "torchrun"):
        print("left to the first task of this node")
        return 0
    if opening.working_directory_is_gone():
        gone = opening.DIRECTORY_GONE
        raise DoctorError(f"{gone}: torch would not start", opening.GO_THERE, WRONG_USAGE)
    return _check(asked, chosen)


def _list(chosen: Sequence[Check]) -> None:
    scope = "machine"
    for check in chosen:
        if check.scope != scope:
            scope = check.scope
            print("\nAcross nodes (--nnodes 2 or more):")
        print(f"{check.name:<20} {check.code}  {check.summary}")


def _check(asked: command_lines.Arguments, chosen: list[Check]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The terminal's encoding may lack letters of a path.
        sys.stdout.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGHUP, _stop)
    began = time.monotonic()
    deadline = Deadline(asked.options.most)
    names = [check.name for check in chosen]
    situation = Situation(asked.options, deadline=deadline, chosen=frozenset(names))
    if asked.options.kill_orphans:
        _end_orphans(situation)
    progress = Progress(names, None if asked.json else _rows(situation, names))
    situation = replace(situation, say=progress.say)
    try:
        # This may have to wake up all GPUs, which must not count as a check's time.
        situation.shared(gpu_facts)
        outcomes = run_checks(chosen, situation, progress.seen)
    finally:
        progress.close()
    seconds = time.monotonic() - began
    _to_reader(lambda: _print(asked, situation, outcomes, seconds))
    return exit_status(outcomes)


def _to_reader(write: Callable[[], None]) -> None:
    """Write to standard output, which its reader may close (`| head -1`)."""
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _rows(situation: Situation, names: Sequence[str]) -> Callable[[Outcome], None]:
    """Print the heading. Return a function that prints the rows as they are known, in order."""
    colour, width = terminal.wants_colour(1), terminal.width(1)
    nodes, ranks = situation.options.nnodes, situation.nproc
    words = count(ranks, "rank")
    if nodes > 1:
        rank = situation.options.node_rank
        words = f"{'a node' if rank is None else f'node {rank}'} of {nodes}, {words} here"
    heading = f"{situation.hostname}: {words}\n\n"
    _to_reader(lambda: print(shown(heading, "\n"), end=""))
    known: dict[str, Outcome] = {}
    left = list(names)

    def row(outcome: Outcome) -> None:
        known[outcome.check] = outcome
        while left and left[0] in known:
            line = result_table([known[left.pop(0)]], colour=colour, width=width)
            _to_reader(lambda line=line: print(line, end=""))  # type: ignore[misc]

    return row


def _print(
    asked: command_lines.Arguments, situation: Situation, outcomes: list[Outcome], seconds: float
) -> None:
    without = excluded_nodes(outcomes)
    if asked.json:
        nodes = verdict_records(situation, outcomes)
        status = exit_status(outcomes)
        print(
            json_document(
                outcomes, situation.hostname, status, seconds, nodes=nodes, exclude=without
            )
        )
        return
    colour, width = terminal.wants_colour(1), terminal.width(1)
    sys.stdout.write(finding_blocks(outcomes, colour=colour, width=width))
    print(f"\n{summary_line(outcomes, seconds)}")
    words = open_words(situation, outcomes)
    if words:
        print(f"\n{shown(words, chr(10))}")
    line = next_line(situation, outcomes)
    if line:
        print(f"\nstart the job on this node with:\n{shown(line)}")
    if without and node_place(situation).rank in (0, None):
        print(f"\nnodes to exclude:\n{shown(','.join(without))}")


def _end_orphans(situation: Situation) -> None:
    """End the ranks that a dead job left behind, if the user confirms it."""
    found = resources.find_orphans(situation)
    if not found:
        print("no rank of an earlier job is left\n")
        return
    for orphan in found:
        print(shown(resources.describe_orphan(orphan)))
    if not situation.options.yes:
        if not sys.stdin.isatty():
            pids = " ".join(str(orphan.process.pid) for orphan in found)
            raise DoctorError(
                "--kill-orphans asks before it ends anything, and there is no terminal to ask on",
                f"ddpdoctor check --kill-orphans --yes, or kill -9 {pids}",
                status=WRONG_USAGE,
            )
        try:
            answer = input(f"End {'these' if len(found) > 1 else 'this'}? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was ended\n")
            return
    left = resources.kill_orphans(found)
    print(f"{len(found) - len(left)} of {len(found)} ended\n")


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """Return 0 if healthy, 1 for warnings, 2 for failures; plus 4 if a check could not run."""
    statuses = {outcome.status for outcome in outcomes}
    worst = FAILED if Status.FAIL in statuses else WARNED if Status.WARN in statuses else 0
    return worst | (NOT_TESTED if Status.COULD_NOT_RUN in statuses else 0)


def _stop(number: int, frame: FrameType | None) -> None:
    """Clean up on SIGTERM and SIGHUP as on Ctrl-C."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
