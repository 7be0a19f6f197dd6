"""From when on a rank is slow: thresholds that the rules share with the live monitor."""

from __future__ import annotations

WARM_UP = 10  # Steps at the beginning that say nothing about the steady state
ENOUGH = 20  # Steps after the warm-up that a verdict needs
SLOWER = 0.15  # A straggler's surplus, as a part of the median step
BORNE_OUT = 0.5  # The part of the surplus that must show as the others' wait
UNEVEN = 2.0
"""How many times as long as the others a stage of a pipeline takes. Layers cannot be cut: with few
layers, the best cut may well give one stage 1.7 times the work."""
DATA_SHARE = 0.20  # The data wait above which a rank is data-bound, as a part of the step
NOTICEABLE = 1_000_000  # The shortest wait in a step that is reported, in nanoseconds

PHASE_NAMES = {
    "data": "data loading",
    "forward": "forward pass",
    "backward": "backward compute",
    "optimizer": "optimizer",
    "other": "code between the phases",
}
"""Names of the parts of a rank's own time in sentences."""


def own_time(own: float, cpu: float, waited: float) -> float:
    """Return a step's own time without waits for a core, but at least what the thread ran.

    Some of these waits were in the all-reduce, so it may be a little more.

    Args:
        own: All of the step but the wait for others, in the same unit of time as the rest.
        cpu: How long the training thread ran.
        waited: How long it was ready to run and had no core.
    """
    return max(own - waited, min(cpu, own))


def stands_out(gap: float, total: float, relief: float) -> bool:
    """Return whether a surplus is worth reporting and the other ranks wait for it.

    Args:
        gap: The rank's own time beyond that of the others, in nanoseconds a step.
        total: The step, in nanoseconds.
        relief: How much longer the others wait than this rank, in nanoseconds a step.
    """
    return gap >= max(SLOWER * total, NOTICEABLE) and relief >= BORNE_OUT * gap
