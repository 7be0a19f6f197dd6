"""``ddpdoctor check``: can a job start, communicate and run here?"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType

import ddpdoctor.preflight  # noqa: F401 (registers the checks)
from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import count, shown
from ddpdoctor.preflight import command_lines
from ddpdoctor.preflight.check import CHECKS, Check, Outcome, Status, run_checks
from ddpdoctor.preflight.command_lines import PARSER
from ddpdoctor.preflight.machine import resources
from ddpdoctor.preflight.nodes.attendance import (
    excluded_nodes,
    next_line,
    open_words,
    verdict_records,
)
from ddpdoctor.preflight.situation import Deadline, Situation, gpu_facts, node_place, places
from ddpdoctor.render import check_results as render
from ddpdoctor.render import terminal

WARNED, FAILED, NOT_TESTED = 1, 2, 4
"""Bits of the exit status: the worse of the first two, and the third one separately, so that a
scheduler can distinguish a broken node from one that had no time."""

WRONG_USAGE = 3


def main(words: Sequence[str]) -> int:
    """Check this machine, and the other nodes if there are any."""
    try:
        asked = command_lines.parse(words)
        chosen = command_lines.choose(asked, CHECKS)
    except DoctorError as error:
        raise DoctorError(error.message, error.hint, status=WRONG_USAGE) from None
    if asked.help:
        sys.stdout.write(PARSER.help)
        return 0
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
    progress = render.Progress(names, None if asked.json else _rows(situation, names))
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
            line = render.table([known[left.pop(0)]], colour=colour, width=width)
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
            render.document(
                outcomes, situation.hostname, status, seconds, nodes=nodes, exclude=without
            )
        )
        return
    colour, width = terminal.wants_colour(1), terminal.width(1)
    sys.stdout.write(render.findings(outcomes, colour=colour, width=width))
    print(f"\n{render.summary(outcomes, seconds)}")
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
