"""The model that each rank gives to DDP, written down before DDP compares and broadcasts it.

Where the models differ, DDP's constructor raises on some ranks and hangs on others, or mixes bytes
up and says nothing: afterwards it is too late.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ddpdoctor.probe.runtime import rank, shield, sites, torch_private

MOST = 4096
"""Parameters that are told of a model."""

MODELS = 16
"""Models that are told of a rank."""

_told = 0


def forget() -> None:
    """In a forked child: nothing was told yet."""
    global _told
    _told = 0


def install(module: ModuleType) -> None:
    """Wrap the comparison of shapes that comes first in DDP's constructor."""
    original = torch_private.verify_parameters(module)
    if original is None:
        return

    @functools.wraps(original)
    def _verify_param_shape_across_processes(
        process_group: Any, tensors: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if rank.active is not None:
            _tell(sys._getframe(1).f_locals.get("self"), process_group, tensors)
        try:
            return original(process_group, tensors, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise

    module._verify_param_shape_across_processes = (  # type: ignore[attr-defined]
        _verify_param_shape_across_processes
    )


@shield.shielded
def _tell(ddp: Any, process_group: Any, tensors: Sequence[Any]) -> None:
    global _told
    state = rank.current()
    model = getattr(ddp, "module", None)
    if state is None or model is None or _told >= MODELS:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    distributed: Any = sys.modules["torch"].distributed
    site = sites.caller()
    state.recorder.add(
        {
            "kind": "model",
            "time": time.time_ns(),
            "number": _told,
            "type": type(model).__name__,
            "group": list(distributed.get_process_group_ranks(process_group)),
            "parameters": [
                [
                    names.get(id(each), ""),
                    list(each.shape),
                    str(each.dtype).removeprefix("torch."),
                ]
                for each in tensors[:MOST]
            ],
            "count": len(tensors),
            "path": site.path,
            "line": site.line,
        }
    )
    _told += 1
    # The constructor may not return.
    state.recorder.flush(0.2)
