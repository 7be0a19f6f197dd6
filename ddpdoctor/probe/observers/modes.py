"""What the job has switched on that changes how its steps are read; the hooks set it."""

from __future__ import annotations

import weakref
from typing import Any

from ddpdoctor.probe.runtime import torch_private

uneven_inputs = False
"""Whether this process ever was within a ``join()`` that is not switched off: from then on ranks
may have taken different numbers of steps."""

last_scaler: weakref.ref[Any] | None = None
"""The GradScaler whose ``step`` was called last."""


def scaler() -> Any:
    """The GradScaler whose ``step`` was called last, if it still lives."""
    return None if last_scaler is None else last_scaler()


def joined(join: Any) -> None:
    """A ``join()`` is entered."""
    global uneven_inputs
    uneven_inputs = uneven_inputs or torch_private.is_enabled(join)
