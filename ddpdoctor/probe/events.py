"""Moments in a rank that several diagnoses want to know of; the hooks call who has subscribed.

A subscriber is shielded by who appends it (`ddpdoctor.probe.shield.shielded`), returns at once when
it has nothing to do, and runs on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ddp_built: list[Callable[[Any], None]] = []
"""A DistributedDataParallel was built: the module."""

forward_begins: list[Callable[[Any, bool], None]] = []
"""A DDP module's forward begins, in grad mode: the module, and whether its backward is reduced."""

backward_ended: list[Callable[[], None]] = []
"""A backward pass ended, its all-reduces done."""

step_begins: list[Callable[[Any], None]] = []
"""An optimizer's step begins: the optimizer."""

step_ended: list[Callable[[Any, int], None]] = []
"""An optimizer's step ended: the optimizer, and the number of the training step it was part of."""

rank_ends: list[Callable[[], None]] = []
"""The rank comes to its regular end, its journal still open."""
