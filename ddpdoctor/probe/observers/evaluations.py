"""Broadcasts of buffers that an evaluation through the DDP wrapper begins.

Without gradients DDP broadcasts a module's buffers before the first forward after a training step,
and not again until the next one: all ranks have to take part in the same one.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ddpdoctor.probe.runtime import events, rank, shield, sites

MOST = 64
"""Records that one rank writes."""

_told: tuple[object, int] = (None, 0)


@shield.shielded
def _buffers_begin(ddp: Any) -> None:
    global _told
    if sys.modules["torch"].is_grad_enabled():
        return
    state = rank.current()
    if state is None:
        return
    count = _told[1] if _told[0] is state else 0
    if count >= MOST:
        return
    _told = state, count + 1
    distributed: Any = sys.modules["torch"].distributed
    site = sites.caller()
    state.recorder.add(
        {
            "kind": "evaluation",
            "time": time.time_ns(),
            "armed": state.tracker.armed,
            "type": type(ddp.module).__name__,
            "group": list(distributed.get_process_group_ranks(ddp.process_group)),
            "buffers": sum(1 for _ in ddp.module.buffers()),
            "path": site.path,
            "line": site.line,
        }
    )


def install() -> None:
    """Listen to the moments of training."""
    events.buffers_begin.append(_buffers_begin)
