"""The command that a node is started with, to be typed."""

from __future__ import annotations

import shlex
from dataclasses import replace

from ddpdoctor.preflight.meeting.place import Seat

NO_ID = "none"
"""The rendezvous id where none was given, as torchrun has it."""


def words(seat: Seat, nproc: int) -> list[str]:
    """The options that place a node in a job, for `ddpdoctor check` and `ddpdoctor run` alike."""
    host = f"[{seat.host}]" if ":" in seat.host else seat.host
    found = ["--nnodes", str(seat.nnodes)]
    if seat.rank is not None:
        found += ["--node-rank", str(seat.rank)]
    found += ["--nproc-per-node", str(nproc), "--rdzv-endpoint", f"{host}:{seat.port}"]
    if seat.rdzv_id != NO_ID:
        found += ["--rdzv-id", seat.rdzv_id]
    return found


def check_line(
    seat: Seat,
    nproc: int,
    *,
    nnodes: int | None = None,
    rank: int | None = None,
    host: str | None = None,
    rdzv_id: str | None = None,
) -> str:
    """The line that starts the check on a node: this one's, with what is changed."""
    changed = replace(
        seat,
        nnodes=seat.nnodes if nnodes is None else nnodes,
        rank=seat.rank if rank is None else rank,
        host=seat.host if host is None else host,
        rdzv_id=seat.rdzv_id if rdzv_id is None else rdzv_id,
    )
    return shlex.join(["ddpdoctor", "check", *words(changed, nproc)])
