"""``e``: versions, launch settings, and what the monitor itself has to say."""

from __future__ import annotations

import time

from ddpdoctor.top import units
from ddpdoctor.top.line import Line
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.top.wrapping import labelled


def draw(snapshot: Snapshot, room: int) -> list[Line]:
    """The facts of the launch."""
    facts = {
        "run": snapshot.run,
        "command": snapshot.command,
        "directory": snapshot.path,
        "ranks": "" if snapshot.world_size is None else str(snapshot.world_size),
    }
    if snapshot.started is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.started))
        facts["started"] = f"{began}, {units.duration(snapshot.time - snapshot.started)} ago"
    if snapshot.exit_status is not None:
        facts["exit status"] = str(snapshot.exit_status)
    if snapshot.nvml:
        facts["nvml"] = snapshot.nvml
    facts.update(snapshot.environment)
    width = min(max((len(name) for name in facts), default=0) + 2, max(room // 3, 8))
    lines: list[Line] = []
    for name, text in facts.items():
        if text:
            lines += labelled(name, text, room, width)
    for note in snapshot.notes:
        lines += labelled("note", note, room, width, "warning")
    return lines or [(("nothing is known of the launch", "dim"),)]
