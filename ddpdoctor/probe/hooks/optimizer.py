"""Optimizers: the end of a step. Uses torch's public global optimizer hooks (2.0 and later)."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from ddpdoctor.probe.runtime import events, rank, shield, torch_private
from ddpdoctor.probe.runtime.sites import site_of
from ddpdoctor.run.status import Phase

_OPTIMIZER = int(Phase.OPTIMIZER)
_HOOK = "optimizer"
_made = False


def install(module: ModuleType) -> None:
    """Register the global step hooks and notice the first optimizer that is made."""
    global _made
    module.register_optimizer_step_pre_hook(_before)
    module.register_optimizer_step_post_hook(_after)
    optimizer_class = module.Optimizer
    original = torch_private.patch_step(optimizer_class)
    if original is None:
        _made = True
        return

    @functools.wraps(original)
    def _patch_step_function(self: Any) -> Any:
        global _made
        _made = True
        for told in events.optimizer_made:
            told(self)
        return original(self)

    optimizer_class._patch_step_function = _patch_step_function


def any_made() -> bool:
    """Whether this process ever made an optimizer."""
    return _made


def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    tracker = rank.active
    if tracker is None or rank.is_compiling() or _HOOK in shield.off:
        return
    try:
        frame = sys._getframe(1)
        if tracker.enter(_OPTIMIZER, site_of(frame)) and tracker.optimizer_frame is None:
            tracker.optimizer_frame = frame
        for told in events.step_begins:
            told(optimizer)
    except Exception as error:
        shield.fault(_HOOK, error)


def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    tracker = rank.active
    if tracker is None or rank.is_compiling() or tracker.phase != _OPTIMIZER:
        return
    try:
        tracker.leave()
        # A subclass whose step calls its parent's is still one step.
        if tracker.phase != _OPTIMIZER:
            tracker.optimizer_frame = None
            number = tracker.steps
            tracker.stepped(optimizer)
            for told in events.step_ended:
                told(optimizer, number)
    except Exception as error:
        shield.fault(_HOOK, error)
