"""Run a job with an overhead budget that is spent: ``spent.py STEP RANKS JOB [ARGUMENT...]``.

From that step on the ranks, ``0,1`` say, have nothing left for diagnosis.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from ddpdoctor.probe.runtime import rank
from ddpdoctor.probe.runtime.budget import Budget


def until_spent(usual: Callable[..., int], step: int, nothing: int) -> Any:
    """A method of the budget that gives ``nothing`` from a step on."""

    def left(self: Budget, **given: bool) -> int:
        state = rank.current()
        spent = state is not None and state.tracker.steps >= step
        return nothing if spent else usual(self, **given)

    return left


if __name__ == "__main__":
    first, ranks = int(sys.argv[1]), sys.argv[2].split(",")
    del sys.argv[:3]
    sys.path[0] = os.path.dirname(sys.argv[0])
    if os.environ["RANK"] in ranks:
        budget: Any = Budget
        budget.left = until_spent(Budget.left, first, -1)
        budget.earned = until_spent(Budget.earned, first, 0)
    runpy.run_path(sys.argv[0], run_name="__main__")
