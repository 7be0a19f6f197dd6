"""From when on a rank is slow: thresholds that the rules share with the live monitor."""

from __future__ import annotations

WARM_UP = 10
"""Steps at the beginning that say nothing about the steady state."""

ENOUGH = 20
"""Steps that a verdict needs, after the warm-up."""

SLOWER = 0.15
"""A straggler's surplus, as a part of the median step."""

BORNE_OUT = 0.5
"""How much of the surplus must be seen again as the others' wait."""

UNEVEN = 2.0
"""How many times as long as the others a stage of a pipeline takes. Layers cannot be cut: of a
network of few of them the best cut may well give one stage 1.7 times the work."""

DATA_SHARE = 0.20
"""Data wait, as a part of the step, above which a rank is data-bound."""

NOTICEABLE = 1_000_000
"""Nanoseconds a step below which a wait is not worth a person's time."""

PHASE_NAMES = {
    "data": "data loading",
    "forward": "forward pass",
    "backward": "backward compute",
    "optimizer": "optimizer",
    "other": "code between the phases",
}
"""What the parts of a rank's own time are called in sentences."""


def own_time(own: float, cpu: float, waited: float) -> float:
    """A step's own time without waits for a core, but at least what the thread ran.

    Some of the waits were in the all-reduce, so it may be a little more.

    Args:
        own: All of the step but the wait for others; all three in one unit of time.
        cpu: For how long the training thread ran.
        waited: For how long it was ready to run and had no core.
    """
    return max(own - waited, min(cpu, own))


def stands_out(gap: float, total: float, relief: float) -> bool:
    """Whether a surplus is worth a word, and waited for by the other ranks.

    Args:
        gap: What a rank spends itself beyond the others, nanoseconds a step.
        total: The step, nanoseconds.
        relief: How much longer the others wait than this rank, nanoseconds a step.
    """
    return gap >= max(SLOWER * total, NOTICEABLE) and relief >= BORNE_OUT * gap
