"""Activity of processes that get no core."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.support.hanging_ranks import TRAIN, call, rank, stacks

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# -- the verdict


def late(frame: tuple[str, int, str], seen: dict[str, Any], **more: Any) -> dict[str, Any]:
    return rank(
        1, "forward", flight=[call(8, True)], stacks=stacks(1, TRAIN, frame), activity=seen, **more
    )
