"""Thresholds of slow ranks, shared by the rules and the live monitor."""

from __future__ import annotations

WARM_UP = 10  # Number of warm-up steps, which do not show the steady state
ENOUGH = 20  # Minimum number of steps after the warm-up
MIN_SURPLUS = 0.15  # Minimum surplus of a straggler, relative to the median step
MIN_WAITED = 0.5  # Minimum wait of the others, as a fraction of the surplus
MIN_STAGE_FACTOR = 2.0
"""Minimum factor by which a stage of a pipeline is slower. Layers cannot be cut: with few layers,
the best cut may give one stage 1.7 times the work."""
DATA_SHARE = 0.20  # Minimum data wait of a data-bound rank, relative to the step
MIN_WAIT_NS = 1_000_000  # Minimum wait in a step to report, in nanoseconds

PHASE_NAMES = {
    "data": "data loading",
    "forward": "forward pass",
    "backward": "backward compute",
    "optimizer": "optimizer",
    "other": "code between the phases",
}
"""Names of the parts of a rank's own time in sentences."""


def own_time(own: float, cpu: float, waited: float) -> float:
    """Return a step's own time without waits for a core, but at least the thread's CPU time.

    ``own`` is the step without waits for others. All arguments have the same unit. Some waits for a
    core are in the all-reduce, so the real value may be a little larger.
    """
    return max(own - waited, min(cpu, own))


def stands_out(gap: float, total: float, relief: float) -> bool:
    """Return whether a surplus is worth reporting and the other ranks wait for it.

    All are nanoseconds a step. ``relief`` is the wait of the others beyond that of this rank.
    """
    return gap >= max(MIN_SURPLUS * total, MIN_WAIT_NS) and relief >= MIN_WAITED * gap
