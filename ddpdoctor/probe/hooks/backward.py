"""The autograd engine: the backward pass and the loss that it starts from."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from ddpdoctor.probe.hooks import amp
from ddpdoctor.probe.observers import finite, losses
from ddpdoctor.probe.observers.steps import Backward
from ddpdoctor.probe.runtime import events, rank, shield, torch_private
from ddpdoctor.probe.runtime.sites import site_of
from ddpdoctor.run.status import Phase

_BACKWARD = int(Phase.BACKWARD)
_HOOK = "backward"


def install(autograd: ModuleType) -> None:
    """Wrap the call of the engine in ``torch.autograd.backward``.

    Below ``backward``, so that the warnings torch raises there still blame the user's line.
    """
    original = torch_private.engine(autograd)
    if original is None:
        return

    @functools.wraps(original)
    def _engine_run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # autograd.grad calls the engine as well, without accumulating: no backward pass.
        entered = bool(kwargs.get("accumulate_grad")) and _before(tensors)
        try:
            result = original(tensors, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            if entered:
                _after(error)
            raise
        if entered:
            _after(None)
        return result

    autograd._engine_run_backward = _engine_run_backward  # type: ignore[attr-defined]


def _before(tensors: Any) -> bool:
    tracker = rank.active
    if tracker is None or _HOOK in shield.off:
        return False
    # Reentrant checkpointing calls backward within backward: one phase, one count.
    if tracker.phase == _BACKWARD:
        return False
    try:
        loss = None
        if len(tensors) == 1 and tensors[0].numel() == 1:
            loss = losses.reader(amp.unscaled(tensors[0]))
        step = tracker.step
        site = site_of(sys._getframe(2))
        if not tracker.enter(_BACKWARD, site):
            return False
        tracker.backwards.append(Backward(tracker.last_change, site))
        step.backwards += 1
        if loss is not None:
            step.loss = loss
            # What is finite is nothing, less itself.
            if callable(loss) or loss - loss != 0.0:
                finite.loss_began(tensors[0], loss)
        for told in events.backward_begins:
            told()
    except Exception as error:
        shield.fault(_HOOK, error)
        return False
    return True


def _after(error: BaseException | None) -> None:
    tracker = rank.active
    if tracker is not None:
        try:
            tracker.leave(error)
            tracker.backwards[-1].ended = tracker.last_change
            if error is None:
                for told in events.backward_ended:
                    told()
        except Exception as broken:
            shield.fault(_HOOK, broken)
