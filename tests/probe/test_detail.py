"""How closely steps are followed, and what a line of the journal that stands for several says."""

from __future__ import annotations

import _thread
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.probe.observers import overhead
from ddpdoctor.probe.observers.overhead import Detail
from ddpdoctor.probe.observers.steps import StepTracker
from ddpdoctor.probe.runtime import events, hot, phases, torch_private
from ddpdoctor.probe.runtime.budget import Budget
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.hot import Chain
from ddpdoctor.probe.runtime.phases import CudaClock
from ddpdoctor.probe.runtime.sites import NOWHERE
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import MAX_EXPANDED, Rank
from ddpdoctor.run.status import PAGE_SIZE, Phase
from tests.support.probed import a_rank

MILLISECOND = 1_000_000


def a_stopwatch() -> Any:
    """What counts the time of hooks."""
    return SimpleNamespace(clocked=False, spent=0)


def followed(number: int, step: int, full: int, light: int, percent: float = 0.5) -> Detail:
    """How closely steps are followed once these costs are known; all in nanoseconds."""
    one = Detail(a_stopwatch())
    one.follow(Budget(percent))
    one.full, one.light = full, light
    one.choose(number, step)
    return one


def test_the_first_steps_are_all_seen() -> None:
    one = followed(overhead.DENSE_STEPS - 1, MILLISECOND, 40_000, 8_000)
    assert (one.line, one.sparse) == (0, 0)


def test_the_dense_beginning_ends_once_it_has_cost_enough() -> None:
    one = followed(overhead.MIN_DENSE_STEPS - 1, MILLISECOND, 400_000, 8_000)
    assert (one.dense, one.sparse) == (True, 0)
    one.choose(overhead.MIN_DENSE_STEPS, MILLISECOND)
    assert (one.dense, one.sparse > 0) == (False, True)


def test_what_comes_once_in_a_pass_is_charged_but_is_of_no_step() -> None:
    budget, hooks = Budget(0.5), SimpleNamespace(clocked=True, spent=5_000_000_000)
    one = overhead.Detail(hooks)
    one.follow(budget)
    one.charge(time.thread_time_ns() - 7_000_000)
    assert budget.followed >= 7_000_000
    assert hooks.spent == 5_000_000_000 - budget.followed


def test_long_steps_are_all_seen() -> None:
    one = followed(5000, 300 * MILLISECOND, 40_000, 8_000)
    assert (one.line, one.sparse) == (0, 0)


def test_steps_are_thinned_until_they_keep_to_half_of_the_budget() -> None:
    # 40 us are 0.4 % of 10 ms; of every second step, with 8 us of the others, 0.24 %.
    assert followed(5000, 10 * MILLISECOND, 40_000, 8_000).sparse == 1
    assert followed(5000, 10 * MILLISECOND, 40_000, 8_000, percent=0.2).sparse == 15
    assert followed(1000, MILLISECOND, 40_000, 8_000).sparse == overhead.EARLY_FULL - 1
    assert followed(5000, MILLISECOND, 40_000, 8_000).sparse == overhead.LATE_FULL - 1


def test_a_line_stands_for_a_third_of_a_second_later_on() -> None:
    assert followed(500, MILLISECOND, 4_000, 2_000).line == 7
    assert followed(5000, MILLISECOND, 4_000, 2_000).line == 511
    assert followed(5000, 20 * MILLISECOND, 4_000, 2_000).line == 15
    assert followed(5000, 1000, 4_000, 2_000).line == overhead.MAX_STEPS - 1


def test_a_line_stands_for_longer_where_steps_cannot_be_thinned_out_any_more() -> None:
    assert followed(5000, 5 * MILLISECOND, 200_000, 8_000).line == 63
    assert followed(5000, 5 * MILLISECOND, 200_000, 14_000).line == 127
    assert followed(1000, MILLISECOND, 40_000, 8_000).line == overhead.EARLY_FULL - 1


@pytest.mark.parametrize("percent", [0, 0.01])
def test_long_steps_are_not_thinned_out_further_by_a_small_budget(percent: float) -> None:
    one = followed(5000, 100 * MILLISECOND, 200_000, 8_000, percent)
    assert (one.sparse, one.line) == (overhead.EARLY_FULL - 1, overhead.EARLY_FULL - 1)


def test_what_diagnoses_take_of_a_clocked_step_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_alarms", [])
    monkeypatch.setattr(events, "due", events.NEVER)
    budget = Budget(0.5)
    hooks = a_stopwatch()
    one = Detail(hooks)
    one.follow(budget)
    one.choose(0, MILLISECOND)
    events.ring(events.due)
    assert hooks.clocked
    hooks.spent += 90_000
    budget.spend(50_000)
    # Of this the hooks have seen nothing.
    budget.spend_behind(100_000)
    one.clock(was_light=False)
    assert (one.full, hooks.clocked) == (40_000, False)
    assert budget.account()[0] == 200_000


@pytest.mark.parametrize(
    ("diagnosed", "full"), [(90_000, 80_000), (95_000, 80_000), (80_000, 71_250)]
)
def test_a_clocked_step_that_diagnoses_took_over_is_no_cheap_one(
    diagnosed: int, full: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count what they take also where no hook is clocked."""
    monkeypatch.setattr(events, "_alarms", [])
    budget, hooks = Budget(0.5), a_stopwatch()
    one = Detail(hooks)
    one.follow(budget)
    one.full = 80_000
    one.clock_next()
    hooks.spent += 90_000
    budget.spend(diagnosed)
    one.clock(was_light=False)
    assert (one.full, hooks.clocked) == (full, False)


def test_a_step_that_seemed_dear_is_forgotten() -> None:
    hooks = a_stopwatch()
    one = Detail(hooks)
    for spent, light in ((33_000, 33_000), (8_000, 8_000), (16_000, 9_000)):
        one.clock_next()
        hooks.spent += spent
        one.sparse, one.pacing = 63, False
        one.clock(was_light=True)
        assert one.light == light


def test_an_alarm_at_the_end_of_a_clocked_step_does_not_cut_it_short() -> None:
    hooks = a_stopwatch()
    one = Detail(hooks)
    one.clock_next()
    hooks.spent += 200_000
    one.clock_next()
    hooks.spent += 40_000
    one.clock(was_light=False)
    assert (one.full, hooks.clocked) == (240_000, False)


def test_what_alarms_take_makes_no_step_look_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that begins to clock is called when the others have been paid for."""
    monkeypatch.setattr(events, "_alarms", [])
    now = [0]
    monkeypatch.setattr("ddpdoctor.probe.runtime.budget.clock", lambda: now[0])
    budget, hooks = Budget(0.5), a_stopwatch()
    monkeypatch.setattr(events, "spending", budget.spending)
    one = Detail(hooks)
    one.follow(budget)
    events.before_step(1, one.clock_next, last=True)
    events.before_step(1, lambda: now.append(now.pop() + 30_000))
    events.ring(1)
    hooks.spent += 40_000
    one.clock(was_light=False)
    assert (one.full, budget.spent) == (40_000, 30_000)


# -- lines


class Clock:
    """A tracker whose clock is set by hand; what it writes is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.written: list[Any] = []
        monkeypatch.setattr(phases, "_now", lambda: self.now)
        page = SimpleNamespace(
            show=lambda *_: None,
            totals=lambda *_: None,
            set_site=lambda _: None,
            reduced=lambda _: None,
            set_gpu=lambda _: None,
            memory=bytearray(PAGE_SIZE),
        )
        recorder: Any = SimpleNamespace(
            page=page, add=self.written.append, each_round=[], dropped=0
        )
        if hot.core is not None:
            hot.core.set_clock(lambda: self.now)
        self.tracker = StepTracker(recorder, lambda: True)
        self.optimizer = self

    def step(self, forward: int = 5, backwards: int = 1, skipped: bool = False) -> None:
        self.tracker.forward(armed=True)
        self.tracker.enter(Phase.FORWARD, NOWHERE)
        self.now += forward
        self.tracker.leave()
        for _ in range(backwards):
            self.tracker.backward_begins(NOWHERE)
        self.now += 1
        self.tracker.stepped(self.optimizer, skipped=skipped)

    def lines(self) -> list[dict[str, Any]]:
        self.tracker.finish()
        return [json.loads(each()) for each in self.written]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    yield Clock(monkeypatch)
    if hot.core is not None:
        hot.core.set_clock(None)


def expanded(lines: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Number, total and backwards of each step."""
    raw = tuple(json.dumps(each).encode() for each in lines)
    return [(s.step, s.total, s.backwards) for s in Rank(0, 0, None, step_lines=raw).steps]


def test_a_line_for_each_step(clock: Clock) -> None:
    for _ in range(3):
        clock.step()
    lines = clock.lines()
    assert [each["step"] for each in lines] == [0, 1, 2]
    assert "steps" not in lines[0]


def test_a_line_for_four_steps_holds_their_mean(clock: Clock) -> None:
    clock.tracker.line = clock.tracker.detail.line = 3
    clock.tracker.detail.choose = lambda *_: None  # type: ignore[method-assign]
    for forward in (5, 5, 9, 1, 7, 7):
        clock.step(forward)
    first, last = clock.lines()
    assert (first["step"], first["steps"], first["forward"], first["total"]) == (3, 4, 5, 6)
    assert (last["step"], last["steps"], last["forward"]) == (5, 2, 7)
    assert expanded([first, last]) == [*((n, 6, 1) for n in range(4)), (4, 8, 1), (5, 8, 1)]


def test_a_line_with_several_full_steps_has_the_samples_of_one(clock: Clock) -> None:
    clock.tracker.line = clock.tracker.detail.line = 7
    clock.tracker.sparse = clock.tracker.detail.sparse = 3
    clock.tracker.detail.choose = lambda *_: None  # type: ignore[method-assign]
    for _ in range(16):
        clock.tracker.fetch(1, first=False)
        if not clock.tracker.light:
            clock.tracker.step.fetched += 32
        clock.step()
    assert [(each["steps"], each["samples"]) for each in clock.lines()] == [(8, 32), (8, 32)]


def test_backwards_that_differ_are_all_known(clock: Clock) -> None:
    clock.tracker.line = clock.tracker.detail.line = 7
    clock.tracker.detail.choose = lambda *_: None  # type: ignore[method-assign]
    for backwards in (2, 2, 2, 1, 2, 2, 2, 2):
        clock.step(backwards=backwards)
    (line,) = clock.lines()
    assert line["each"] == [2, 3, 1, 1, 2, 4]
    assert [backwards for _, _, backwards in expanded([line])] == [2, 2, 2, 1, 2, 2, 2, 2]


def test_a_skipped_step_ends_its_line(clock: Clock) -> None:
    clock.tracker.line = clock.tracker.detail.line = 7
    clock.tracker.detail.choose = lambda *_: None  # type: ignore[method-assign]
    clock.step()
    clock.step(skipped=True)
    clock.step()
    first, last = clock.lines()
    assert (first["step"], first["steps"], first["skipped"]) == (1, 2, True)
    assert "skipped" not in last
    assert list(clock.tracker.skipped) == [1]


def test_what_lies_between_epochs_is_in_no_line(clock: Clock) -> None:
    clock.tracker.line = clock.tracker.detail.line = 7
    clock.tracker.detail.choose = lambda *_: None  # type: ignore[method-assign]
    clock.step()
    clock.step()
    clock.now += 1000
    clock.tracker.outside()
    clock.step()
    first, last = clock.lines()
    assert (first["step"], first["total"], last["step"], last["total"]) == (1, 6, 2, 6)
    assert last["outside"] == 1000


class Device:
    """A GPU that does everything at once, as ``torch.cuda``."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.markers = 0
        self.index = 0

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802 (torch's name)
        return Marker(self)

    def current_stream(self, device: object) -> None:
        return None

    def is_current_stream_capturing(self) -> bool:
        return False


class Marker:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: object) -> None:
        self.device.markers += 1
        self.number = self.device.markers
        self.at = self.device.clock.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Marker) -> float:
        return (later.at - self.at) / 1e6


def test_steps_not_seen_in_full_leave_no_markers_in_a_gpu(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(clock)
    monkeypatch.setattr(torch_private, "current_stream", lambda *_: lambda: None)
    tracker = clock.tracker
    tracker.use_device(CudaClock(device, device))
    tracker.line = tracker.detail.line = 3
    tracker.sparse = tracker.detail.sparse = 3
    tracker.detail.choose = lambda *_: None  # type: ignore[method-assign]
    markers = []
    for forward in (5, 30, 30, 7):
        before = device.markers
        clock.step(forward)
        markers.append(device.markers - before)
    # The phases of the first and the last, and one where each kind of step begins.
    assert markers == [4, 0, 1, 4]
    (line,) = clock.lines()
    # The second and the third took 62 of the 76: their phases are taken to be like the others'.
    assert line["total"] == pytest.approx(76 / 4, abs=1)
    assert line["forward"] == pytest.approx(76 * 12 / 14 / 4, abs=1)
    assert line["other"] == pytest.approx(76 * 2 / 14 / 4, abs=1)


def test_a_device_that_hangs_shows_how_far_it_has_come(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(clock)
    monkeypatch.setattr(torch_private, "current_stream", lambda *_: lambda: None)
    own = CudaClock(device, device)
    clock.tracker.use_device(own)
    clock.step(5)
    # It passes nothing that is queued from here on.
    passed = device.markers
    monkeypatch.setattr(Marker, "query", lambda marker: marker.number <= passed)
    began = time.time_ns()
    clock.step(5)
    reached, *ahead = own.standing()
    assert [phase for phase, _, _ in ahead] == ["other", "forward", "other"]
    assert (reached[2], [passed for *_, passed in ahead]) == (True, [False] * 3)
    assert reached[1] <= began <= ahead[0][1] <= ahead[1][1] <= ahead[2][1]


@pytest.mark.parametrize(("behind", "ahead"), [(30, True), (3, False)])
def test_the_work_of_a_host_that_runs_ahead_of_its_gpu(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, behind: int, ahead: bool
) -> None:
    """The GPU passes a marker so long after the host put it there; nothing waits for it."""
    device = Device(clock)
    monkeypatch.setattr(torch_private, "current_stream", lambda *_: lambda: None)
    monkeypatch.setattr(time, "time_ns", lambda: clock.now)
    monkeypatch.setattr(Marker, "query", lambda marker: clock.now >= marker.at + behind)
    own = CudaClock(device, device)
    for queueing in (6, 5, 4, 2, 9):
        clock.now += 20
        own.charge(Phase.OTHER)
        clock.now += queueing
        own.charge(Phase.FORWARD)
        clock.now += 1
        own.charge(Phase.BACKWARD)
        own.step_ended()
    found = own.cut()
    clock.now += behind
    own.cut()
    timed = found()
    assert timed is not None
    # The fourth step and the fifth. Queueing counts as in the fourth, where it took least.
    assert timed.host == (2 * (20 + 2 + 1) if ahead else 0)


def test_a_host_that_waits_for_its_gpu_after_the_forward_does_not_work(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``loss.item()`` between forward and backward waits for the all-reduce of the step before."""
    device = Device(clock)
    monkeypatch.setattr(torch_private, "current_stream", lambda *_: lambda: None)
    monkeypatch.setattr(time, "time_ns", lambda: clock.now)
    monkeypatch.setattr(Marker, "query", lambda marker: clock.now >= marker.at + 30)
    own = CudaClock(device, device)
    for _ in range(5):
        for phase, took in (
            (Phase.OTHER, 2), (Phase.FORWARD, 1), (Phase.OTHER, 40), (Phase.BACKWARD, 1),
        ):  # fmt: skip
            clock.now += took
            own.charge(phase)
        own.step_ended()
    found = own.cut()
    clock.now += 30
    own.cut()
    timed = found()
    assert timed is not None and timed.host == 2 * (2 + 1)


def test_a_wait_beside_the_hosts_own_work_is_none() -> None:
    step = StepRecord(step=9, backward=10, other=1, wait=14, total=25, split=True, host=22)
    assert (step.settled.wait, step.settled.other, step.settled.own) == (3, 12, 22)
    waits = replace(step, host=5)
    assert waits.settled == waits


@pytest.mark.parametrize(("busy", "looks"), [(0, 1), (3, 4), (1000, 2)])
def test_a_device_has_a_moment_at_the_end(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, busy: int, looks: int
) -> None:
    """It is never waited for: one that hangs, or has more to do, is left alone."""
    asked = 0

    def query(marker: Marker) -> bool:
        nonlocal asked
        asked += 1
        clock.now += phases.SETTLE_TIME // 2 if busy > 3 else MILLISECOND
        return asked > busy

    monkeypatch.setattr(torch_private, "current_stream", lambda *_: lambda: None)
    monkeypatch.setattr(phases, "_now", lambda: clock.now)
    monkeypatch.setattr(Marker, "query", query)
    device = Device(clock)
    CudaClock(device, device).settle()
    assert asked == looks


def test_a_hostile_line_stands_for_a_bounded_number_of_steps() -> None:
    line = b'{"kind":"step","step":999999999,"total":5,"steps":999999999,"each":[7,-3,2,99999999]}'
    found = Rank(0, 0, None, step_lines=(line,)).steps
    assert len(found) == MAX_EXPANDED
    assert found[-1].step == 999999999


# -- call sites


def test_a_line_is_found_again_and_no_other_one_is_taken_for_it() -> None:
    chain = Chain(1)
    found = []
    for _ in range(3):
        found.append(chain.sites()[0])
    line = found[0].line
    assert {each.line for each in found} == {line}
    assert chain.sites()[0].line == line + 3


def _library() -> Callable[[Callable[[], object], list[object]], None]:
    """A function of torch's, as its file says, that calls another one."""
    names: dict[str, Any] = {}
    source = "def through(call, found):\n    found.append(call())\n"
    exec(compile(source, torch.__file__, "exec"), names)
    return names["through"]  # type: ignore[no-any-return]


def test_a_function_of_the_job_in_place_of_one_of_torch_is_the_line() -> None:
    chain = Chain(1)

    def mine(call: Callable[[], object], found: list[Any]) -> None:
        found.append(call())

    found: list[Any] = []
    for through in (_library(), mine, _library()):
        through(chain.sites, found)
    here, inner, again = (each.line for (each,) in found)
    assert here == again == inner + 4


def test_a_line_further_out_is_seen_after_a_call_without_any() -> None:
    chain, through = Chain(1), _library()
    found: list[Any] = []
    # Unlike those of `threading`, such a thread has no frame before its function's.
    _thread.start_new_thread(through, (chain.sites, found))
    while not found:
        time.sleep(0.001)
    through(chain.sites, found)
    assert found[0] == (NOWHERE,)
    assert found[1][0].path == __file__


def test_callers_are_found_again_and_no_others_are_taken_for_them() -> None:
    chain = Chain()

    def inner() -> tuple[int, ...]:
        return tuple(each.line for each in chain.sites())

    same = {inner() for _ in range(3)}
    other = inner()
    assert len(same) == 1
    ((one, here, *_),) = same
    assert other[0] == one
    assert other[1] == here + 1


# -- observers that rest


class Counting(Observer):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(a_rank([]))
        self.calls = 0

    def backward_begins(self) -> None:
        self.calls += 1
        if self.calls == 2:
            self.rest("backward_begins")


def test_an_observer_rests_until_it_is_woken() -> None:
    one = Counting()
    events.forget()
    try:
        events.subscribe(one)
        for _ in range(4):
            for subscriber in events.backward_begins:
                subscriber()
        assert one.calls == 2
        events.before_step(7, lambda: one.wake("backward_begins"))
        assert events.due == 7
        events.ring(7)
        assert (len(events.backward_begins), events.due) == (1, events.NEVER)
        events.pause(one, paused=True)
        assert events.backward_begins == ()
        events.pause(one, paused=False)
        assert len(events.backward_begins) == 1
    finally:
        events.forget()


def test_what_the_writing_thread_takes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr("ddpdoctor.probe.runtime.budget._now", lambda: now[0])
    budget = Budget(0.5)
    one = Detail(SimpleNamespace(clocked=False, spent=0))
    one.follow(budget)
    one.full, one.light = 100_000.0, 10_000.0

    def chosen(number: int, milliseconds: int, wrote: float) -> int:
        now[0] += 1000 * MILLISECOND
        budget.writing += int(wrote * MILLISECOND)
        one._step = 0.0
        one.choose(number, milliseconds * MILLISECOND)
        return one.sparse + 1

    assert chosen(1024, 20, wrote=0) == 4, "10 us, and 90 by 4, of 50"
    before = budget.followed
    assert chosen(2048, 20, wrote=1) == 8, "0.1 % of the time leaves 30 us"
    assert budget.written == 0.001
    assert budget.followed - before >= MILLISECOND
    assert chosen(3072, 40, wrote=500) == 4, "a quarter is left in any case: 50 us"
