"""Uneven inputs (``join()``): from then on ranks may have taken different numbers of steps."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from ddpdoctor.probe.runtime import shield, torch_private

seen = False
"""Whether this process ever was within a ``join()`` that is not switched off."""


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
    global seen
    seen = seen or torch_private.is_enabled(join)
