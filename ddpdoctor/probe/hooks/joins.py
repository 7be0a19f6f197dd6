"""Uneven inputs (``join()``): from then on ranks may have taken different numbers of steps."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from ddpdoctor.probe.observers import modes
from ddpdoctor.probe.runtime import shield, torch_private


def install(module: ModuleType) -> None:
    """Hook ``torch.distributed.algorithms.join.Join``, which DDP's own ``join`` returns."""
    original = module.Join.__enter__

    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        _entered(self)
        return original(self)

    module.Join.__enter__ = __enter__


@shield.shielded
def _entered(join: Any) -> None:
    modes.uneven_inputs = modes.uneven_inputs or torch_private.is_enabled(join)
