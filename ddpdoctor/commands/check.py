"""``ddpdoctor check``: can a job start, talk and run here?"""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

import ddpdoctor.preflight  # noqa: F401 (registers the checks)
from ddpdoctor.core import working_directory
from ddpdoctor.core.control_characters import shown
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.preflight import arguments
from ddpdoctor.preflight.check import CHECKS, Check, Outcome, Status, run_checks
from ddpdoctor.preflight.deadline import Deadline
from ddpdoctor.preflight.machine import orphans
from ddpdoctor.preflight.nodes.attendance import next_line
from ddpdoctor.preflight.place import places
from ddpdoctor.preflight.situation import Situation, gpu_facts
from ddpdoctor.render import checks as render
from ddpdoctor.render import terminal

COULD_NOT_RUN = 3


def main(words: Sequence[str]) -> int:
    """Check this machine, and the other nodes if there are any.

    Raises:
        DoctorError: The command line cannot work.
    """
    try:
        asked = arguments.parse(words)
        chosen = arguments.choose(asked, CHECKS)
    except DoctorError as error:
        raise DoctorError(error.message, error.hint, status=COULD_NOT_RUN) from None
    if asked.help:
        sys.stdout.write(arguments.PARSER.help)
        return 0
    if asked.list:
        _list(chosen)
        return 0
    if any(place.local_rank for place in places(os.environ) if place.launcher != "torchrun"):
        print("left to the first task of this node")
        return 0
    if working_directory.is_gone():
        gone = working_directory.GONE
        raise DoctorError(
            f"{gone}: torch would not start", working_directory.GO_THERE, COULD_NOT_RUN
        )
    return _check(asked, chosen)


def _list(chosen: Sequence[Check]) -> None:
    scope = "machine"
    for check in chosen:
        if check.scope != scope:
            scope = check.scope
            print("\nAcross nodes (--nnodes 2 or more):")
        print(f"{check.name:<20} {check.code}  {check.summary}")


def _check(asked: arguments.Arguments, chosen: list[Check]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path may have letters that the terminal's encoding has not.
        sys.stdout.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGHUP, _stop)
    began = time.monotonic()
    deadline = Deadline(asked.options.timeout)
    names = [check.name for check in chosen]
    situation = Situation(asked.options, deadline=deadline, chosen=frozenset(names))
    if asked.options.kill_orphans:
        _end_orphans(situation)
    progress = render.Progress(names)
    situation = replace(situation, say=progress.say)
    try:
        # It may have to wake up all GPUs first, which no check is to be blamed for.
        situation.shared(gpu_facts)
        outcomes = run_checks(chosen, situation, progress.seen)
    finally:
        progress.close()
    status = exit_status(outcomes)
    seconds = time.monotonic() - began
    try:
        _print(asked, situation, outcomes, seconds)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough (`| head -1`); how it ended remains true.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return status


def _print(
    asked: arguments.Arguments, situation: Situation, outcomes: list[Outcome], seconds: float
) -> None:
    host = socket.gethostname()
    if asked.json:
        print(render.document(outcomes, host, exit_status(outcomes), seconds))
        return
    colour = terminal.wants_colour(1)
    width = min(shutil.get_terminal_size((80, 24)).columns, 100)
    sys.stdout.write(shown(_heading(situation, host), "\n"))
    sys.stdout.write(render.table(outcomes, colour=colour, width=width))
    sys.stdout.write(render.findings(outcomes, colour=colour, width=width))
    print(f"\n{render.summary(outcomes, seconds)}")
    line = next_line(situation, outcomes)
    if line:
        print(f"\nstart the job on this node with:\n{shown(line)}")


def _end_orphans(situation: Situation) -> None:
    """Ask whether the ranks that a dead job left behind are to be ended, and do it."""
    found = orphans.find(situation)
    if not found:
        print("no rank of an earlier job is left\n")
        return
    for orphan in found:
        print(shown(orphans.describe(orphan)))
    if not sys.stdin.isatty():
        pids = " ".join(str(orphan.process.pid) for orphan in found)
        raise DoctorError(
            "--kill-orphans asks before it ends anything, and there is no terminal to ask on",
            f"kill -9 {pids}",
            status=COULD_NOT_RUN,
        )
    try:
        answer = input(f"End {'these' if len(found) > 1 else 'this'}? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        print("nothing was ended\n")
        return
    left = orphans.kill(found)
    print(f"{len(found) - len(left)} of {len(found)} ended\n")


def _heading(situation: Situation, host: str) -> str:
    nodes, ranks = situation.options.nnodes, situation.nproc
    words = f"{ranks} rank{'s' if ranks != 1 else ''}"
    if nodes > 1:
        rank = situation.options.node_rank
        words = f"{'a node' if rank is None else f'node {rank}'} of {nodes}, {words} here"
    return f"{host}: {words}\n\n"


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """0 healthy, 1 warnings, 2 failures, 3 a check could not run; a failure outweighs the rest."""
    statuses = {outcome.status for outcome in outcomes}
    if Status.FAIL in statuses:
        return 2
    if Status.COULD_NOT_RUN in statuses:
        return COULD_NOT_RUN
    return 1 if Status.WARN in statuses else 0


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM and SIGHUP clean up as Ctrl-C does."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
