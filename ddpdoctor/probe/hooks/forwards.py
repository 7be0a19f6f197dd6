"""Forward passes of what is no DDP module: ``fully_shard`` (FSDP2), and stages of pipelines.

The outermost counts: blocks that are sharded by themselves, and what activation checkpointing runs
again in backward, are part of what they run in.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ddpdoctor.probe.runtime import rank, shield, torch_dynamo, torch_private
from ddpdoctor.probe.runtime.sites import caller
from ddpdoctor.probe.runtime.wrapping import around
from ddpdoctor.run.status import Phase

_FORWARD = int(Phase.FORWARD)
_BETWEEN = (int(Phase.STARTING), int(Phase.OTHER))
_HOOK = "forward"


def install_stages(module: ModuleType) -> None:
    """Forward passes of micro-batches; DDP's own are followed by its hook."""
    stage_class = getattr(module, torch_private.STAGE, None)
    around(stage_class, torch_private.STAGE_FORWARD, _HOOK, _micro_batch_begins, _ended)


def _micro_batch_begins(stage: Any, *args: Any, **kwargs: Any) -> bool | None:
    tracker = rank.active
    if tracker is None or tracker.phase not in _BETWEEN or torch_private.is_ddp(stage.submod):
        return None
    return tracker.enter(_FORWARD, caller()) or None


def install_sharded(module: ModuleType) -> None:
    """``FSDPModule``, the class that ``fully_shard`` gives a module as its first base.

    Its ``__call__`` alone: a hook in a module would be pickled with it, and one around FSDP's own
    hooks would not notice that a forward raised.
    """
    sharded = getattr(module, "FSDPModule", None)
    if sharded is None or "__call__" in vars(sharded):
        return

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = _begins()
        try:
            result = super(sharded, self).__call__(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            if begun:
                _after(error)
            raise
        if begun:
            _after(None)
        return result

    torch = sys.modules["torch"]
    sharded.__call__ = torch_dynamo.disable_dynamo(torch, __call__, False)


def _begins() -> bool:
    tracker = rank.active
    if tracker is None or tracker.phase not in _BETWEEN or _HOOK in shield.off:
        return False
    try:
        if not tracker.is_here():
            return False
        if sys.modules["torch"].is_grad_enabled():
            tracker.forward(False)
        else:
            tracker.evaluating()
        return tracker.enter(_FORWARD, caller())
    except Exception as error:
        shield.fault(_HOOK, error)
    return False


def _after(error: BaseException | None) -> None:
    try:
        _ended(True, None, error)
        tracker = rank.active
        if tracker is not None and error is None and not sys.modules["torch"].is_grad_enabled():
            tracker.evaluated()
    except Exception as broken:
        shield.fault(_HOOK, broken)


def _ended(begun: bool, result: Any, error: BaseException | None) -> None:
    tracker = rank.active
    if tracker is not None:
        tracker.leave(error)
