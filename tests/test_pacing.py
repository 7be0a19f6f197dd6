"""Which steps are followed when following them is dear."""

from __future__ import annotations

import pytest

from ddpdoctor.probe.observers import pacing
from ddpdoctor.probe.observers.pacing import Pacing
from ddpdoctor.probe.runtime import events, shield
from ddpdoctor.probe.runtime.budget import Budget
from tests.probed import a_rank

MILLISECOND = 1_000_000


def followed(
    monkeypatch: pytest.MonkeyPatch, *, step: int, cost: int, steps: int = 4096
) -> tuple[list[int], list[int], Budget]:
    """The steps that are followed, those of them that are not judged, and what was paid."""
    budget = Budget(0.5)
    state = a_rank([], budget)
    clock = [0]
    monkeypatch.setattr(pacing, "_now", lambda: clock[0])
    one = Pacing(state)
    seen, unjudged = [], []
    for number in range(steps):
        if one.awake:
            seen.append(number)
            if one.settling:
                unjudged.append(number)
            if one.measuring:
                one.cost = cost
        clock[0] += step
        state.tracker.steps = number + 1
        if number + 1 >= events.due:
            events.ring(number + 1)
    return seen, unjudged, budget


def test_long_steps_are_all_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, unjudged, _ = followed(monkeypatch, step=10 * MILLISECOND, cost=20_000)
    assert (seen, unjudged) == (list(range(4096)), [])


def test_of_short_steps_some_windows_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, unjudged, budget = followed(monkeypatch, step=MILLISECOND, cost=20_000)
    assert seen[: pacing.DENSE] == list(range(pacing.DENSE))
    later = [number for number in seen if number >= pacing.DENSE]
    # 20 us of a step of 1 ms are 2 %, which is eight times a half of the 0.5 % that are allowed.
    assert {number // pacing.WINDOW % 8 for number in later} == {0}
    assert len(later) == (4096 - pacing.DENSE) // 8
    assert unjudged[:4] == [1152, 1153, 1280, 1281]
    assert budget.followed == pytest.approx(20_000 * len(seen), rel=0.05)


def test_the_beginning_costs_other_diagnoses_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, budget = followed(monkeypatch, step=MILLISECOND, cost=20_000, steps=1_000)
    assert budget.followed == pytest.approx(20 * MILLISECOND, rel=0.05)
    assert budget.left() >= 50 * MILLISECOND


def test_what_is_paced_is_not_among_the_hooks_that_are_clocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter((1_000, 4_000))
    monkeypatch.setattr(pacing, "clock", lambda: next(ticks))
    state = a_rank([], clocked=True, spent=5_000)
    Pacing(state).paced(lambda: None)()
    assert state.tracker.spent == 2_000


def test_ranks_of_different_cost_share_their_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    often, _, _ = followed(monkeypatch, step=MILLISECOND, cost=8_000)
    rarely, _, _ = followed(monkeypatch, step=MILLISECOND, cost=50_000)
    assert len(rarely) < len(often) < 4096
    assert set(rarely) <= set(often)


def test_a_window_is_followed_however_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _, _ = followed(monkeypatch, step=1000, cost=MILLISECOND)
    assert set(range(3072, 3072 + pacing.WINDOW)) <= set(seen)


def test_a_subscriber_that_raises_goes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def raises(number: int) -> None:
        calls.append(number)
        raise ValueError

    monkeypatch.setattr(shield, "off", set())
    monkeypatch.setattr(shield, "faults", [])
    paced = Pacing(a_rank([])).paced(raises)
    paced(1)
    paced(2)
    assert calls == [1]
