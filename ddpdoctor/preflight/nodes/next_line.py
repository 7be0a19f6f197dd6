"""The line that starts the job on this node, once the checks found nothing against it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ddpdoctor.preflight.check import Outcome, Status
from ddpdoctor.preflight.meeting.meet import meeting_of
from ddpdoctor.preflight.situation import Situation

PLACEHOLDER = "train.py"


def next_line(situation: Situation, outcomes: Sequence[Outcome]) -> str:
    """The `ddpdoctor run` line for this node; empty after a failure, or without other nodes."""
    if any(outcome.status in (Status.FAIL, Status.COULD_NOT_RUN) for outcome in outcomes):
        return ""
    if not any(outcome.check == "nodes" for outcome in outcomes):
        return ""
    meeting = meeting_of(situation)
    seat, options = meeting.seat, situation.options
    if meeting.problem is not None or len(meeting.nodes) != seat.nnodes:
        return ""
    host = f"[{seat.host}]" if ":" in seat.host else seat.host
    words = ["ddpdoctor", "run", "--nnodes", str(seat.nnodes)]
    if seat.rank is None:
        words += ["--rdzv-backend", "c10d"]
    else:
        words += ["--node-rank", str(seat.rank)]
    words += ["--nproc-per-node", str(situation.nproc)]
    words += ["--rdzv-endpoint", f"{host}:{seat.port}"]
    if seat.rdzv_id != "none":
        words += ["--rdzv-id", seat.rdzv_id]
    if options.module:
        words.append("-m")
    words += ["--", *(options.script or (PLACEHOLDER,))]
    return shlex.join(words)
