"""Made-up runs for the monitor's tests."""

from __future__ import annotations

from collections.abc import Callable

from ddpdoctor.top.frames import Visible
from ddpdoctor.top.live import LiveSource
from tests.support.generated import Generated

Make = Callable[..., Generated]
ALL = Visible()


def living(run: Generated, steps: int = 30) -> LiveSource:
    run.start()
    if steps:
        run.steps(steps)
    return LiveSource(run.path, 1.0)
