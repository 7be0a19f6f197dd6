"""Ask the ranks of a live run to do something at the same step, for ``eval`` and ``profile``."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from typing import Any

from ddpdoctor.debug.sessions import Session, connect, for_each
from ddpdoctor.run.reader import glance
from ddpdoctor.run.snapshot import Run

MAX_APART = 1  # Maximum steps between ranks that train in lockstep


def ask(
    run: Run, ranks: Collection[int], command: str, lead: float, **arguments: Any
) -> dict[int, dict[str, Any]]:
    """Send each rank a request with the number of a step. Return the responses by rank.

    Args:
        run: The run.
        ranks: The ranks to ask.
        command: A key of :data:`ddpdoctor.debug.clients.AT_STEP`.
        lead: Seconds until the step, so that all ranks have been asked by then.
        arguments: Other arguments of the command.
    """
    found: dict[int, dict[str, Any]] = {}
    sessions: dict[int, Session] = {}

    def reach(rank: int) -> None:
        sessions[rank] = Session(rank, connect(run, rank), threading.Condition())

    def send(rank: int) -> None:
        found[rank] = sessions[rank].ask(command, step=step, **arguments)

    troubles = for_each(ranks, reach)
    # Read the step only now: ranks keep training while the others are being connected to.
    step = _step(glance(run.path), ranks, lead)
    troubles |= for_each(sessions, send)
    for session in sessions.values():
        session.close()
    return {rank: found.get(rank, {"trouble": text}) for rank, text in troubles.items()}


def trouble(answer: dict[str, Any]) -> str:
    """Return why a rank returned no value."""
    return f"*** {answer.get('error') or answer.get('trouble') or 'no value'}"


def _step(run: Run, ranks: Collection[int], lead: float) -> int:
    """Return the number of the next step that all ranks can begin together.

    Returns 0, for each rank's next step, if the ranks do not train in lockstep.
    """
    pages = [each.status for each in run.last if each.rank in ranks and each.status is not None]
    steps = [each.step for each in pages]
    if not steps or max(steps) - min(steps) > MAX_APART:
        return 0
    shortest = min(each.last_total for each in pages) / 1e9
    return max(steps) + (min(math.ceil(lead / shortest), 10_000) if shortest > 0 else 1)
