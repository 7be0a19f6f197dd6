"""Which steps are followed when following them is dear."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.probe.observers import overhead
from ddpdoctor.probe.observers.overhead import Detail, Pacing
from ddpdoctor.probe.runtime import events
from ddpdoctor.probe.runtime.budget import Budget
from tests.support.probed import a_rank

MILLISECOND = 1_000_000


def a_detail(cost: float = 0.0, light: float = 0.0) -> Detail:
    """Light steps that take so many nanoseconds, and so many more where gradients are followed."""
    one = Detail(SimpleNamespace(clocked=False, spent=0))
    one.sparse, one.full = 63, light + 6_400.0
    one.light, one.paced = light, light + cost
    return one


def followed(
    monkeypatch: pytest.MonkeyPatch,
    *,
    step: int,
    cost: int,
    steps: int = 4096,
    percent: float = 0.5,
    light: int = 200,
) -> tuple[list[int], list[int], Budget]:
    """The steps that are followed, those of them that are not judged, and what was paid."""
    monkeypatch.setattr(events, "_alarms", [])
    monkeypatch.setattr(events, "due", events.NEVER)
    budget = Budget(percent)
    state = a_rank([], budget, detail=a_detail(cost, light))
    clock = [0]
    monkeypatch.setattr(overhead, "_now", lambda: clock[0])
    one = Pacing(state)
    seen, unjudged = [], []
    for number in range(steps):
        if state.tracker.detail.pacing:
            seen.append(number)
            if one.settling:
                unjudged.append(number)
        clock[0] += step
        state.tracker.steps = number + 1
        if number + 1 >= events.due:
            events.ring(number + 1)
    return seen, unjudged, budget


def test_of_long_steps_one_window_in_64_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, unjudged, _ = followed(monkeypatch, step=10 * MILLISECOND, cost=20_000)
    windows = [number // overhead.WINDOW for number in range(4096) if number not in set(seen)]
    assert windows == [each for each in (63, 127, 191, 255) for _ in range(overhead.WINDOW)]
    assert unjudged == [start + each for start in (1024, 2048, 3072) for each in (0, 1)]


def test_a_light_step_that_seemed_dear_once_is_no_reason_to_follow_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the first one may, which comes where nothing is in the caches yet."""
    monkeypatch.setattr(events, "_alarms", [])
    monkeypatch.setattr(events, "due", events.NEVER)
    hooks: Any = SimpleNamespace(clocked=False, spent=0)
    one = Detail(hooks)
    one.sparse, one.full, one.light, one.paced = 63, 90_000.0, 33_000.0, 26_000.0
    state = a_rank([], Budget(0.5), detail=one)
    clock = [0]
    monkeypatch.setattr(overhead, "_now", lambda: clock[0])
    Pacing(state)
    seen = []
    for number in range(4096):
        if one.pacing:
            seen.append(number)
        if hooks.clocked:
            hooks.spent = 26_000 if one.pacing else 6_000
            one.clock(was_light=True)
        clock[0] += MILLISECOND
        state.tracker.steps = number + 1
        if number + 1 >= events.due:
            events.ring(number + 1)
    # A window of the beginning is left out, and shows what light steps take.
    assert [each for each in seen if each < 1024] == list(range(63 * overhead.WINDOW))
    assert len([each for each in seen if each >= 1024]) == 3072 // 64


def test_of_short_steps_some_windows_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, unjudged, budget = followed(monkeypatch, step=MILLISECOND, cost=20_000)
    assert seen[: overhead.DENSE_STEPS] == list(range(overhead.DENSE_STEPS))
    windows = {number // overhead.WINDOW for number in seen if number >= overhead.DENSE_STEPS}
    # 20 us of a step of 1 ms are 2 %, and of the 0.5 % that are allowed a half at most is for it.
    assert windows == {*range(16, 64, 4), *range(64, 256, 16)}
    assert len(seen) == overhead.DENSE_STEPS + len(windows) * overhead.WINDOW
    assert unjudged[:4] == [320, 321, 384, 385]
    assert budget.followed == pytest.approx(20_000 * len(seen), rel=0.05)


def test_the_beginning_costs_other_diagnoses_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _, budget = followed(monkeypatch, step=MILLISECOND, cost=20_000, steps=1_000)
    assert budget.followed == pytest.approx(20_000 * len(seen), rel=0.05)
    assert budget.left(samples=True) >= 40 * MILLISECOND


def test_steps_of_either_kind_are_clocked_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_alarms", [])
    monkeypatch.setattr(events, "due", events.NEVER)
    hooks: Any = SimpleNamespace(clocked=False, spent=0)
    one = Detail(hooks)
    one.sparse = 3
    for one.pacing, spent in ((True, 9_000), (False, 2_000)):
        one.clock_next()
        assert hooks.clocked
        hooks.spent += spent
        one.clock(was_light=True)
    assert (one.paced, one.light, one.surplus) == (9_000, 2_000, 7_000)
    # Where every step is seen in full, what it takes is among what these take.
    one.sparse = 0
    assert one.surplus == 0


def test_a_step_of_each_fourth_followed_window_is_clocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocked: list[bool] = []
    monkeypatch.setattr(Detail, "clock_next", lambda self: clocked.append(self.pacing))
    followed(monkeypatch, step=MILLISECOND, cost=20_000)
    # 4, 8, 12 of the first 16 windows, 16, 32, 48 until the 64th, 64, 128, 192 of the others.
    assert clocked == [True] * (3 + 3 + 3)


def test_light_steps_are_clocked_outside_of_followed_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines of the journal end where these begin."""
    monkeypatch.setattr(events, "_alarms", [])
    monkeypatch.setattr(events, "due", events.NEVER)
    monkeypatch.setattr(overhead, "CLOCKED_EVERY", 0)
    one = a_detail(20_000, 3_000)
    due = set()
    for number in range(2048, 4096, 64):
        one.choose(number, MILLISECOND)
        if (events.due + 1) & one.sparse:
            due.add(events.due // overhead.WINDOW % 4)
        events.ring(events.due)
    assert due == {1}


def test_ranks_of_different_cost_share_their_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    often, _, _ = followed(monkeypatch, step=MILLISECOND, cost=8_000)
    rarely, _, _ = followed(monkeypatch, step=MILLISECOND, cost=50_000)
    assert len(rarely) < len(often) < 4096
    assert set(rarely) <= set(often)


def test_a_window_is_followed_however_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _, _ = followed(monkeypatch, step=1000, cost=MILLISECOND)
    assert set(range(3072, 3072 + overhead.WINDOW)) <= set(seen)


@pytest.mark.parametrize(("light", "every"), [(100, 8), (1_400, 16), (2_000, 32), (8_000, 64)])
def test_what_the_hooks_take_is_not_there_for_gradients(
    monkeypatch: pytest.MonkeyPatch, light: int, every: int
) -> None:
    """Of 5 us a step 1 is kept for diagnoses, 1.25 for what is not seen; all hooks take 0.1 more
    than light ones.

    A sixteenth is there in any case.
    """
    seen, _, _ = followed(monkeypatch, step=MILLISECOND, cost=20_000, light=light)
    later = {number // overhead.WINDOW for number in seen if number >= overhead.EARLY_STEPS}
    assert later == set(range(64, 256, every))


def test_without_a_budget_the_fewest_windows_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _, _ = followed(monkeypatch, step=MILLISECOND, cost=20_000, percent=0)
    assert {number // overhead.WINDOW for number in seen if number >= overhead.EARLY_STEPS} == {
        64,
        128,
        192,
    }


def test_between_followed_windows_it_is_seldom_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    turn = Pacing._turn

    def look(self: Pacing, number: int) -> None:
        looked.append(number)
        turn(self, number)

    monkeypatch.setattr(Pacing, "_turn", look)
    followed(monkeypatch, step=MILLISECOND, cost=20_000, percent=0)
    # At the end of one that is followed, and four times until the next one.
    windows = [number // overhead.WINDOW for number in looked if number >= overhead.EARLY_STEPS]
    assert windows == [64, 65, 80, 96, 112, 128, 129, 144, 160, 176, 192, 193, 208, 224, 240, 256]


def test_where_steps_become_long_all_are_followed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_alarms", [])
    monkeypatch.setattr(events, "due", events.NEVER)
    state = a_rank([], Budget(0.5), detail=a_detail(20_000, light=200))
    clock = [0]
    monkeypatch.setattr(overhead, "_now", lambda: clock[0])
    Pacing(state)
    seen = []
    for number in range(4096):
        if state.tracker.detail.pacing:
            seen.append(number)
        clock[0] += MILLISECOND if number < 2060 else 20 * MILLISECOND
        state.tracker.steps = number + 1
        if number + 1 >= events.due:
            events.ring(number + 1)
    # The look that comes next sees it, two windows later.
    later = [
        each
        for each in range(2080, 4096)
        if (each // overhead.WINDOW + 1) % overhead.UNFOLLOWED_EVERY
    ]
    assert seen[seen.index(2048) + overhead.WINDOW :] == later
