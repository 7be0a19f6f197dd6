"""What diagnosis may cost: what is earned, what is spent, and what is left."""

from __future__ import annotations

import pytest

from ddpdoctor.probe.runtime import budget as accounts
from ddpdoctor.probe.runtime.budget import Budget
from ddpdoctor.run.names import BUDGET

MILLISECOND = 1_000_000


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the budget's clock shows, in nanoseconds."""
    shown = [0]
    monkeypatch.setattr(accounts, "_now", lambda: shown[0])
    return shown


def test_kernels_that_a_gpu_loads_need_not_be_earned_again() -> None:
    budget = Budget(0.5)
    before = budget.left()
    budget.spend_first(120 * MILLISECOND, usual=5 * MILLISECOND)
    assert before - budget.left() == pytest.approx(5 * MILLISECOND, abs=MILLISECOND)
    assert budget.account()[0] == 160 * MILLISECOND
    budget.spend_first(1000 * MILLISECOND, usual=5 * MILLISECOND)
    assert budget.left() < 0


def test_following_steps_leaves_a_fifth_for_diagnoses(now: list[int]) -> None:
    """A quarter is left for what no clock sees."""
    budget = Budget(1)
    now[0] = 800 * MILLISECOND
    budget.follow(3 * MILLISECOND)
    assert budget.earned() == 3 * MILLISECOND
    budget.follow(1000 * MILLISECOND)
    assert budget.earned() == 1.6 * MILLISECOND


def test_what_runs_within_is_paid_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr("ddpdoctor.probe.runtime.budget.clock", lambda: now[0])
    budget = Budget(1)
    with budget.spending():
        now[0] += 5
        with budget.spending():
            now[0] += 3
        budget.spend(2)
        now[0] += 4
    assert budget.spent == 12
    with budget.spending():
        # Estimated to cost more than its clock saw, as what a device does.
        budget.spend(100)
    assert budget.spent == 112


def test_what_was_earned_stays_whatever_following_takes_later(now: list[int]) -> None:
    """Else diagnoses wait for minutes where steps get shorter, or can be thinned out no more."""
    budget = Budget(1)
    now[0] = 1000 * MILLISECOND
    budget.follow(4 * MILLISECOND)
    assert budget.earned() == 3.5 * MILLISECOND
    for _ in range(2):
        now[0] += 1000 * MILLISECOND
        budget.follow(500 * MILLISECOND)
    assert budget.earned() == (3.5 + 2 * 2) * MILLISECOND


def test_to_follow_the_first_steps_costs_no_diagnosis_its_turn(now: list[int]) -> None:
    budget = Budget(1)
    now[0] = 800 * MILLISECOND
    budget.follow(1000 * MILLISECOND, granted=True)
    assert budget.earned() == 6 * MILLISECOND
    assert budget.followed == 1000 * MILLISECOND
    budget.follow(4 * MILLISECOND)
    assert budget.earned() == 2 * MILLISECOND


def test_other_diagnoses_leave_a_part_of_the_credit_for_samples(now: list[int]) -> None:
    budget = Budget(0.1)
    budget.spend(budget.left())
    assert (budget.left(), budget.left(samples=True)) == (0, accounts.SAMPLES_RESERVE_NS)
    with budget.spending(samples=True):
        budget.spend(accounts.SAMPLES_RESERVE_NS - 7, samples=True)
        now[0] += 3
    budget.spend(20, samples=True)
    assert budget.left() == budget.left(samples=True) < 0


def test_without_a_budget_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUDGET, "0")
    purse = accounts.from_environment()
    purse.grant(10**9)
    assert not purse.enabled
    assert purse.left() < 0


def test_a_budget_tells_what_was_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0, 2 * 10**9, 4 * 10**9))
    monkeypatch.setattr(accounts, "_now", lambda: next(clock))
    purse = Budget(1)
    purse.spend(5_000_000)
    earned = 20_000_000 - 20_000_000 // accounts.UNMEASURED_DIVISOR
    kept = accounts.SAMPLES_RESERVE_NS
    assert purse.left() == accounts.CREDIT_NS // 100 + earned - 5_000_000 - kept
    assert purse.account() == (6_666_666, 0, 4 * 10**9), "with what no clock shows"
