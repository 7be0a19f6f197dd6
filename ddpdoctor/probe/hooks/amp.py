"""GradScaler: steps that it skips still count, and the loss is the one before scaling."""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import Any

from ddpdoctor.probe.observers import modes
from ddpdoctor.probe.runtime import rank, shield

_scaled: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None


def install(module: ModuleType) -> None:
    """Wrap ``torch.amp.GradScaler.scale`` and ``.step``; ``torch.cuda.amp``'s inherits them."""
    scaler_class = module.GradScaler
    _wrap_scale(scaler_class)
    _wrap_step(scaler_class)


def unscaled(loss: Any) -> Any:
    """The tensor that was scaled into ``loss``, or ``loss`` itself."""
    if _scaled is not None and _scaled[0]() is loss:
        original = _scaled[1]()
        if original is not None:
            return original
    return loss


def _wrap_scale(scaler_class: Any) -> None:
    original = scaler_class.scale

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        global _scaled
        try:
            result = original(self, outputs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        try:
            if rank.active is not None and result is not outputs:
                _scaled = weakref.ref(result), weakref.ref(outputs)
        except TypeError:
            _scaled = None
        return result

    scaler_class.scale = scale


def _wrap_step(scaler_class: Any) -> None:
    original = scaler_class.step

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = rank.active
        before = 0 if tracker is None else tracker.optimizer_steps
        if tracker is not None and modes.scaler() is not self:
            modes.last_scaler = weakref.ref(self)
        try:
            result = original(self, optimizer, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        try:
            if tracker is not None and tracker.optimizer_steps == before:
                tracker.stepped(optimizer, skipped=True)
        except Exception as error:
            shield.fault("amp", error)
        return result

    scaler_class.step = step
