"""A rank of a hang that was looked at, with what its process did."""

from __future__ import annotations

from typing import Any

from ddpdoctor.core.finding import Severity
from ddpdoctor.diagnose.hangs.hang_snapshot import RankState
from ddpdoctor.diagnose.hangs.rank_activity import Activity
from tests.support.hanging_ranks import NOW, rank, stacks, state

LOAD = ("/job/train.py", 88, "load")
MB = 1 << 20
LOADER = "/lib/site-packages/torch/utils/data/dataloader.py"


def seen(*frames: tuple[str, int, str], **more: Any) -> RankState:
    """A rank that was looked at, with what its process did within a second."""
    record = {"flight": [], "stacks": stacks(1, *(frames or (LOAD,)))}
    known = {key: more.pop(key) for key in [*more] if key in KNOWN}
    activity = {"seconds": 1.0, "letters": "SS", **more}
    return state(rank(1, "other", **{**record, "activity": activity, **known}))


KNOWN = (
    "phase", "since", "step", "site", "ended", "exit", "stacks", "later", "silent", "lost",
    "launcher_works", "pid", "workers",
)  # fmt: skip


def said(found: Activity | None) -> tuple[str, Severity, str]:
    assert found is not None
    return found.code, found.severity, found.text


def died(seconds: float) -> dict[str, Any]:
    return {"time": NOW - int(seconds * 1e9), "status": -9}
