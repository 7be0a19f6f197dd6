"""What changes a model or its training from outside a step: weights loaded, learning rates cut."""

from __future__ import annotations

import functools
import sys
import time
from types import ModuleType
from typing import Any

from ddpdoctor.probe.runtime import rank, shield, sites, torch_private

MOST = 64
"""Records of each kind that one rank writes."""

_told: dict[str, int] = {}
_loading = False


def forget() -> None:
    """In a forked child: nothing was told yet."""
    _told.clear()


def install_module(module: ModuleType) -> None:
    """Wrap ``torch.nn.Module.load_state_dict``, which raises and warns nothing by stack level."""
    module_class: Any = module.Module
    original = module_class.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _loading
        outermost = rank.active is not None and not _loading
        if outermost:
            _loading = True
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        finally:
            if outermost:
                _loading = False
        if outermost:
            _loaded(self)
        return result

    module_class.load_state_dict = load_state_dict


@shield.shielded
def _loaded(module: Any) -> None:
    from ddpdoctor.probe.observers import fingerprints

    numbers = fingerprints.modules_that_hold(module)
    for number in numbers:
        _tell("load", {"module": number, "what": type(module).__name__})


def install_optimizer(module: ModuleType) -> None:
    """Wrap ``torch.optim.Optimizer.load_state_dict``."""
    optimizer_class: Any = module.Optimizer
    original = optimizer_class.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        if rank.active is not None:
            _resumed(self)
        return result

    optimizer_class.load_state_dict = load_state_dict


@shield.shielded
def _resumed(optimizer: Any) -> None:
    _tell("resume", {"what": type(optimizer).__name__})


def install_schedules(module: ModuleType) -> None:
    """Wrap the moment in which ReduceLROnPlateau cuts the learning rate."""
    plateau = getattr(module, "ReduceLROnPlateau", None)
    original = torch_private.reduce_lr(plateau)
    if plateau is None or original is None:
        return

    @functools.wraps(original)
    def _reduce_lr(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        _cut()
        return result

    plateau._reduce_lr = _reduce_lr


@shield.shielded
def _cut() -> None:
    _tell("cut", {"what": "ReduceLROnPlateau"})


def _tell(kind: str, more: dict[str, Any]) -> None:
    state = rank.current()
    if state is None or _told.get(kind, 0) >= MOST:
        return
    _told[kind] = _told.get(kind, 0) + 1
    site = sites.site_of(sys._getframe(1))
    state.recorder.add(
        {
            "kind": kind,
            "time": time.time_ns(),
            "step": state.tracker.steps,
            "path": site.path,
            "line": site.line,
            **more,
        }
    )
