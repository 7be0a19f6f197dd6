"""``init_process_group``: the moment a process becomes a rank."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from ddpdoctor.probe import rank, shield

_become = shield.shielded(rank.become)


def install(c10d: ModuleType) -> None:
    """Wrap ``torch.distributed.distributed_c10d.init_process_group``.

    Runs before ``torch.distributed`` copies the name, so every way to reach it is wrapped.
    """
    original = c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        _become(sys.modules["torch"])
        return result

    c10d.init_process_group = init_process_group  # type: ignore[attr-defined]
