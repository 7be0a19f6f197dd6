"""From when on a rank is slow: the same for the rules and for the live monitor."""

from __future__ import annotations

WARM_UP = 10
"""Steps at the beginning that say nothing about the steady state."""

SLOWER = 0.15
"""A straggler's surplus, as a part of the median step."""

BORNE_OUT = 0.5
"""How much of the surplus must be seen again as the others' wait."""

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
