"""The line that starts the job on this node, once the checks found nothing against it."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.preflight.check import Outcome, Status
from ddpdoctor.preflight.command_lines import run_line, words
from ddpdoctor.preflight.protocol.meet import meeting_of
from ddpdoctor.preflight.situation import Situation


def next_line(situation: Situation, outcomes: Sequence[Outcome]) -> str:
    """The `ddpdoctor run` line for this node; empty after a failure, or without other nodes."""
    if any(outcome.status in (Status.FAIL, Status.COULD_NOT_RUN) for outcome in outcomes):
        return ""
    if not any(outcome.check == "nodes" for outcome in outcomes):
        return ""
    meeting = meeting_of(situation)
    seat = meeting.seat
    if meeting.problem is not None or len(meeting.nodes) != seat.nnodes:
        return ""
    line = words(seat, situation.nproc)
    if seat.rank is None:
        line += ["--rdzv-backend", "c10d"]
    return run_line(situation, *line)
