"""Runs checks side by side, each with its own time limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from ddpdoctor.preflight.check import Check, Outcome, could_not_run
from ddpdoctor.preflight.situation import Situation

LOOK_EVERY = 1.0
"""Most seconds between looks at the limits of the checks that run."""

GRACE = 1.0
"""Seconds that a check has after its limit to say what it found by then."""

CLEANUP = 3.0
"""Most seconds to wait, after Ctrl-C, for checks to end what they started."""


def run_checks(
    checks: Iterable[Check],
    situation: Situation,
    seen: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run checks in parallel threads, and wait for them.

    Args:
        checks: Which.
        situation: What they go by; its deadline is that of all of them.
        seen: Called on this thread with each outcome as it comes.

    Returns:
        An outcome for each check, in their order.

    Raises:
        KeyboardInterrupt: It was pressed; what the checks had started is ended.
    """
    wanted = list(checks)
    answers: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    threads = {}
    began = time.monotonic()
    for each in wanted:
        own = situation.within(each.limit)
        thread = threading.Thread(
            target=_run, args=(each, own, answers), name=f"check {each.name}", daemon=True
        )
        threads[each.name] = thread
    outcomes: dict[str, Outcome] = {}
    limits = {each.name: min(each.limit, situation.deadline.left()) + GRACE for each in wanted}
    try:
        for thread in threads.values():
            thread.start()
        while len(outcomes) < len(wanted):
            passed = time.monotonic() - began
            open_limits = [limit for name, limit in limits.items() if name not in outcomes]
            for outcome in _next(answers, max(0.05, min(open_limits) - passed)):
                if outcome.check not in outcomes:
                    outcomes[outcome.check] = outcome
                    seen(outcome)
            passed = time.monotonic() - began
            for name, limit in limits.items():
                if name not in outcomes and passed > limit:
                    late = could_not_run(f"no answer within {limit - GRACE:.0f} s")
                    outcomes[name] = replace(late, check=name, seconds=passed)
                    seen(outcomes[name])
    except BaseException:
        situation.deadline.cancel()
        until = time.monotonic() + CLEANUP
        for thread in threads.values():
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
        raise
    return [outcomes[each.name] for each in wanted]


def _next(answers: queue.SimpleQueue[Outcome], seconds: float) -> list[Outcome]:
    """What comes next, within so many seconds; a signal interrupts the waiting."""
    found = []
    try:
        found.append(answers.get(timeout=min(seconds, LOOK_EVERY)))
        while True:
            found.append(answers.get_nowait())
    except queue.Empty:
        return found


def _run(check: Check, situation: Situation, answers: queue.SimpleQueue[Outcome]) -> None:
    began = time.monotonic()
    try:
        outcome = check.run(situation)
    except Exception as error:  # a fault of the check must not end the others, nor look like a pass
        text = " ".join(str(error).split())
        outcome = could_not_run(f"{type(error).__name__}: {text}" if text else type(error).__name__)
    answers.put(replace(outcome, check=check.name, seconds=time.monotonic() - began))
