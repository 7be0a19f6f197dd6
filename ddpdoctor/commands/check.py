"""``ddpdoctor check``: check whether a job can run here, and print the results."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, TextIO

import ddpdoctor.preflight  # noqa: F401 (registers the checks)
from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import json_text, shown
from ddpdoctor.preflight import command_lines
from ddpdoctor.preflight.check import (
    CHECKS,
    Check,
    Outcome,
    Status,
    causes_only,
    outcome_record,
    run_checks,
)
from ddpdoctor.preflight.machine import resources
from ddpdoctor.preflight.nodes.attendance import (
    excluded_nodes,
    next_line,
    open_words,
    verdict_records,
)
from ddpdoctor.preflight.protocol.meet import meeting_of
from ddpdoctor.preflight.situation import Deadline, Situation, gpu_facts, node_place, places
from ddpdoctor.render import terminal
from ddpdoctor.render.check_screen import View, screen
from ddpdoctor.render.json_lines import FORMAT
from ddpdoctor.render.terminal import StatusLine

# -- the document, and the progress


def json_document(
    outcomes: Sequence[Outcome], host: str, seconds: float, nodes: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return all outcomes, with the nodes that met, as one JSON object."""
    return json_text(
        {
            "format": FORMAT,
            "host": host,
            "exit_status": exit_status(outcomes),
            "seconds": round(seconds, 3),
            "nodes": list(nodes),
            "exclude": excluded_nodes(outcomes),
            "checks": [outcome_record(outcome) for outcome in outcomes],
        },
        indent=2,
    )


class Progress(StatusLine):
    """A line with the checks that are still running, on a terminal only."""

    def __init__(self, names: Sequence[str], stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self.ended: list[Outcome] = []
        self._running = list(names)
        self._total = len(self._running)
        self._count()

    def seen(self, outcome: Outcome) -> None:
        """Note that a check ended."""
        self.ended.append(outcome)
        self._running.remove(outcome.check)
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
        # The terminal's encoding may lack characters of a path.
        sys.stdout.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGHUP, _stop)
    began = time.monotonic()
    deadline = Deadline(asked.options.most)
    names = [check.name for check in chosen]
    situation = Situation(asked.options, deadline=deadline, chosen=frozenset(names))
    if asked.options.kill_orphans:
        _end_orphans(situation)
    progress = Progress(names)
    situation = replace(situation, say=progress.say)
    try:
        # This may have to wake all GPUs, which must not count towards a check's time.
        situation.shared(gpu_facts)
        outcomes = causes_only(run_checks(chosen, situation, progress.seen))
    except KeyboardInterrupt:
        progress.close()
        if progress.ended and not asked.json:
            view = _view(asked, situation, (), began)
            view = replace(view, running=len(names) - len(progress.ended))
            ended = sorted(progress.ended, key=lambda outcome: names.index(outcome.check))
            _to_reader(lambda: print(screen(causes_only(ended), view), end=""))
        raise
    finally:
        progress.close()
    _to_reader(lambda: _print(asked, situation, outcomes, began))
    return exit_status(outcomes)


def _view(
    asked: command_lines.Arguments, situation: Situation, outcomes: Sequence[Outcome], began: float
) -> View:
    options, meeting = situation.options, None
    if any(CHECKS[outcome.check].scope == "nodes" for outcome in outcomes):
        meeting = meeting_of(situation)
    met = meeting is not None and meeting.problem is None and len(meeting.nodes) > 1
    first = meeting.host(0) if meeting is not None and met and meeting.own else ""
    return View(
        situation.hostname,
        situation.nproc,
        options.nnodes,
        node_place(situation).rank,
        met=met,
        first=first,
        nodes=() if first else verdict_records(situation, outcomes),
        seconds=time.monotonic() - began,
        verbose=asked.verbose,
        colour=terminal.wants_colour(1),
        width=terminal.width(1),
    )


def _to_reader(write: Callable[[], None]) -> None:
    """Write to standard output, which its reader may close (`| head -1`)."""
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _print(
    asked: command_lines.Arguments, situation: Situation, outcomes: list[Outcome], began: float
) -> None:
    if asked.json:
        nodes = verdict_records(situation, outcomes)
        print(json_document(outcomes, situation.hostname, time.monotonic() - began, nodes))
        return
    without = excluded_nodes(outcomes)
    view = _view(asked, situation, outcomes, began)
    sys.stdout.write(screen(outcomes, view))
    if without and not view.first:
        print(f"\nnodes to exclude: {shown(','.join(without))}")
    # Skip this after a failure: all nodes have to be checked again anyway.
    failed = exit_status(outcomes) & FAILED
    words = "" if view.first or failed else open_words(situation, outcomes)
    if words:
        print(f"\n{shown(words, chr(10))}")
    line = "" if without else next_line(situation, outcomes)
    if line:
        print(f"\nstart the job on {situation.hostname} with:\n{shown(line)}")


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
