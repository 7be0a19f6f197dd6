"""Gradient clipping: ``torch.nn.utils.clip_grad_norm_`` and its like, with the lines that call."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from ddpdoctor.probe.observers import edits
from ddpdoctor.probe.runtime import rank, shield, sites

NAMES = ("clip_grad_norm_", "clip_grad_value_")


def install(module: ModuleType) -> None:
    """Wrap them in ``torch.nn.utils.clip_grad``, before ``torch.nn.utils`` copies their names."""
    for name in NAMES:
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, _wrapped(name, original))


def _wrapped(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        if rank.active is not None and not rank.is_compiling():
            _clips(name)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise

    return clip


@shield.shielded
def _clips(name: str) -> None:
    edits.called(name, sites.caller())
