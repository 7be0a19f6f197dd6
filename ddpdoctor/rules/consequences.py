"""Ends of ranks that only follow from collectives which were not about the same thing."""

from __future__ import annotations

import signal

from ddpdoctor.rules.decisions import decisions
from ddpdoctor.rules.endings import Ending, mispaired
from ddpdoctor.rules.evaluation import forward_under_rank_guard
from ddpdoctor.rules.mismatch import come_apart
from ddpdoctor.run import Run


def apart(run: Run) -> bool:
    """Whether it is known why the ranks' collectives were not about the same thing."""
    return bool(decisions(run)) or any(forward_under_rank_guard(run)) or come_apart(run)


def follows(run: Run, restart: int, cause: Ending) -> bool:
    """Whether an end is the consequence of what some ranks alone did."""
    if restart != run.restarts[-1]:
        return False
    if mispaired(run, cause):
        return apart(run)
    # Its last words, which say that, are read when the job has ended.
    return cause.status == -signal.SIGABRT and come_apart(run)
