"""Moments in a rank that several diagnoses want to know of; the hooks call who has subscribed.

A subscriber is shielded by who appends it (`ddpdoctor.probe.runtime.shield.shielded`), returns at
once when it has nothing to do, and runs on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

group_joined: list[Callable[[Any], None]] = []
"""This process has joined the default process group: the torch module."""

ddp_built: list[Callable[[Any], None]] = []
"""A DistributedDataParallel was built: the module."""

forward_begins: list[Callable[[Any, bool], None]] = []
"""A DDP module's forward begins, in grad mode: the module, and whether its backward is reduced."""

evaluation_begins: list[Callable[[Any], None]] = []
"""A DDP module's forward begins without gradients: the module."""

buffers_begin: list[Callable[[Any], None]] = []
"""DDP is about to broadcast its module's buffers before a forward: the DDP module."""

backward_begins: list[Callable[[], None]] = []
"""A backward pass begins, before any gradient of it."""

backward_ended: list[Callable[[], None]] = []
"""A backward pass ended, its all-reduces done."""

optimizer_made: list[Callable[[Any], None]] = []
"""An optimizer is being made, its parameters not yet in it; the process may be no rank yet."""

batch_fetched: list[Callable[[Any, Any], None]] = []
"""A loader gave a batch: the loader's iterator, and the batch."""

loader_exhausted: list[Callable[[Any], None]] = []
"""A loader came to its end: its iterator."""

collective_begins: list[Callable[[str], None]] = []
"""A collective is called from Python: its name."""

step_begins: list[Callable[[Any], None]] = []
"""An optimizer's step begins: the optimizer."""

step_ended: list[Callable[[Any, int], None]] = []
"""An optimizer's step ended: the optimizer, and the number of the training step it was part of."""

rank_fails: list[Callable[[BaseException], None]] = []
"""An exception ends the process of the rank; its record is about to be written."""

rank_ends: list[Callable[[], None]] = []
"""The rank comes to its regular end, its journal still open."""
