"""How long the training thread was ready to run and had to wait for a CPU core.

On a machine that runs more than it has cores for, a rank may be slow through no fault of its own.
The kernel counts this wait by thread (``/proc/thread-self/schedstat``, Linux). It is read some
twenty times in a job's life: at steps that double, and at the end.
"""

from __future__ import annotations

import time
from typing import Any

from ddpdoctor.probe import events, rank, shield

FIRST = 10
"""The step after which it is read first."""

_FILE = "/proc/thread-self/schedstat"

_due: tuple[object, int] = (None, 0)
"""The rank, and the number of its step after which the wait is read next."""


@shield.shielded
def _step_ended(optimizer: Any, number: int) -> None:
    global _due
    if number < _due[1]:
        return
    state = rank.current()
    if state is None:
        return
    if _due[0] is not state:
        _due = state, FIRST
        return
    _due = state, max(2 * number, FIRST)
    _tell(state)


@shield.shielded
def _rank_ends() -> None:
    state = rank.current()
    if state is not None and _due[0] is state:
        _tell(state)


def _tell(state: rank.RankState) -> None:
    try:
        with open(_FILE, "rb") as file:
            ran, waited = map(int, file.read().split()[:2])
    except (OSError, ValueError):
        # No Linux, or a kernel that does not count.
        return
    state.recorder.add(
        {
            "kind": "cores",
            "time": time.time_ns(),
            "step": state.tracker.steps,
            "ran": ran,
            "waited": waited,
        }
    )


def install() -> None:
    """Listen to the moments of training."""
    events.step_ended.append(_step_ended)
    events.rank_ends.append(_rank_ends)
