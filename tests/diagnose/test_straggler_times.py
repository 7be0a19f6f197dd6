"""DDP610 on written runs: when a straggler is judged, and jobs that are short."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ddpdoctor.core.finding import RULES, Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.run.reader import RunReader
from tests.support.straggling import BACKWARD, MAIN, asked, loop, profile, rank, stack, steps
from tests.support.written import Written

# -- when


def test_the_verdict_waits_for_the_samples_of_a_live_run(written: Written) -> None:
    now = time.time_ns()
    written.supervisor.append({"kind": "profile", "time": now, "restart": 0, "asked": 1, "rank": 1})
    rank(written, 0, steps(10, 40, 9, 0))
    rank(written, 1, steps(50, 1, 45, 0))
    assert written.findings() == []


def test_the_verdict_does_not_wait_for_ever(written: Written) -> None:
    asked(written)
    rank(written, 0, steps(10, 40, 9, 0))
    rank(written, 1, steps(50, 1, 45, 0))
    assert [each.ranks for each in written.findings()] == [(1,)]


# -- jobs that are short


def short(written: Written, slow: int = 20, *, sampled: bool = True, gap: float = 40) -> None:
    """A job of 20 steps, in the first of which, or all, rank 1 is slower."""
    asked(written)
    work = stack(40, MAIN, loop(30))
    own = gap + 10
    rank(written, 0, [*steps(10, gap, 9, 0, last=20), *([profile(BACKWARD)] if sampled else [])])
    mine = [*steps(own, 1, own - 5, 0, last=slow), *list(steps(10, gap, 9, 0, last=20))[slow:]]
    rank(written, 1, [*mine, *([profile(work)] if sampled else [])])


def test_a_short_job_may_go_on(written: Written) -> None:
    short(written)
    assert written.findings() == []


def test_a_short_job_is_judged_at_its_end(written: Written) -> None:
    short(written)
    (finding,) = written.findings(status=0)
    assert (finding.code, finding.ranks) == ("DDP610", (1,))
    assert finding.location == Location("/job/train.py", 30)
    assert "medians of 18 steps" in str(finding.evidence)


@pytest.mark.parametrize(
    "less", [{"sampled": False}, {"slow": 12}, {"slow": 9}, {"gap": 8}], ids=str
)
def test_what_few_steps_do_not_show_is_not_told(written: Written, less: dict[str, Any]) -> None:
    """No line, the beginning alone, or a gap that is no larger than what chance makes."""
    short(written, **less)
    assert written.findings(status=0) == []


@pytest.mark.parametrize(("halves", "found"), [(1, 1), (2, 0)])
def test_few_steps_have_to_show_it_all_but_one(written: Written, halves: int, found: int) -> None:
    """Half of the surplus is none."""
    slow, half = list(steps(50, 1, 45, 0, last=20)), list(steps(30, 21, 25, 0, last=20))
    asked(written)
    rank(written, 0, [*steps(10, 40, 9, 0, last=20), profile(BACKWARD)])
    mine = [*slow[: 20 - halves], *half[20 - halves :]]
    rank(written, 1, [*mine, profile(stack(40, MAIN, loop(30)))])
    assert len(written.findings(status=0)) == found


def test_samples_of_a_slow_machine_are_waited_for(written: Written) -> None:
    """A minute, where each of them has to wait for a core."""
    then = time.time_ns() - 60_000_000_000
    asked_then = {"kind": "profile", "time": then, "restart": 0, "asked": 1, "rank": 1}
    written.supervisor.append(asked_then)
    rank(written, 0, [*steps(10, 40, 9, 0), profile(BACKWARD)])
    rank(written, 1, steps(50, 1, 45, 0))
    assert written.findings() == []


def test_samples_that_were_asked_for_earlier_serve_where_later_ones_are_missing(
    written: Written,
) -> None:
    asked(written)
    written.supervisor.append({**written.supervisor[0], "asked": 2})
    rank(written, 0, [*steps(10, 40, 9, 0), profile(BACKWARD)])
    rank(written, 1, [*steps(50, 1, 45, 0), profile(stack(40, MAIN, loop(30)))])
    (finding,) = written.findings(status=0)
    assert finding.location == Location("/job/train.py", 30)


@pytest.mark.parametrize(("number", "over"), [(1, False), (0, True), (2, True), (9, True)])
def test_it_is_over_for_the_ranks_that_are_not_slow(
    written: Written, number: int, over: bool
) -> None:
    for each, own in ((0, 10), (1, 14), (2, 10)):
        rank(written, each, steps(own, 16 - own, 9, 0))
    written.findings(status=0)
    finding = Finding("DDP610", Severity.WARNING, "slow", (number,), about=f"rank {number}")
    run = RunReader(written.path).snapshot()
    assert (RULES["DDP610"].lapses(finding, run) is not None) is over


@pytest.mark.parametrize(("own", "over"), [(11, False), (10.2, True)])
def test_it_is_over_once_the_rank_has_caught_up(written: Written, own: float, over: bool) -> None:
    """Between the bar and half of it, it stands: steps on a crowded machine scatter."""
    rank(written, 0, steps(10, 2, 9, 0))
    rank(written, 1, steps(own, 1, 9, 0))
    assert written.findings(status=0) == []
    finding = Finding("DDP610", Severity.WARNING, "slow", (1,), about="rank 1")
    run = RunReader(written.path).snapshot()
    assert (RULES["DDP610"].lapses(finding, run) is not None) == over


@pytest.mark.parametrize(
    ("length", "waited", "found"), [(3, 2, 0), (12, 8, 1), (3, 0.05, 1)], ids=str
)
def test_what_lasts_too_short_on_a_busy_machine_is_not_told(
    written: Written, length: float, waited: float, found: int
) -> None:
    """A core was slower for 70 ms, all that the job trained: 24 steps after the warm-up."""
    rank(written, 0, steps(length, length, 0.5 * length, waited, last=34))
    rank(written, 1, steps(2 * length - 0.1, 0.1, 1.5 * length, waited, last=34))
    assert len(written.findings(status=0)) == found
