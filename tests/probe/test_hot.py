"""The compiled core does what the Python beside it does, and faults in it stay ours."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdoctor.probe.runtime import events, hot, phases, rank, shield, wrapping
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.status import PAGE_SIZE, Phase, StatusPage
from tests.support.probed import page_of_memory

pytestmark = pytest.mark.skipif(hot.core is None, reason="the core is not compiled here")

SHOWN = (
    "phase", "steps", "armed", "forwards", "backward_count", "reduced", "begun", "step_armed",
    "step_backwards", "now", "failed", "collective", "loop_batches", "loop_backwards",
)  # fmt: skip


# -- phases


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["enter", "leave", "fail", "charge", "forward", "backward", "ended", "keep", "take",
             "kept", "reset", "start", "loop", "batch"]
        ),
        st.integers(1, 6),
        st.integers(0, 50),
    ),
    max_size=60,
)  # fmt: skip


def follow(one: Any, name: str, phase: int, site: Site, error: BaseException) -> object:
    """One thing that hooks do."""
    calls: dict[str, Callable[[], object]] = {
        "enter": lambda: one.enter(phase, site),
        "leave": lambda: one.leave(),
        "fail": lambda: one.leave(error),
        "charge": lambda: one.charge(),
        "forward": lambda: one.forward_begins(phase > 2),
        "backward": lambda: one.backward_begins(site),
        "ended": lambda: one.backward_ended(),
        "keep": lambda: one.keep(),
        "take": lambda: one.take(),
        "kept": lambda: one.take(kept=True),
        "reset": lambda: one.reset(),
        "start": lambda: one.start(),
        "loop": lambda: setattr(one, "looped", phase),
        "batch": lambda: one.goes_on(phase),
    }
    return calls[name]()


@given(steps=STEPS)
def test_both_follow_the_phases_alike(
    steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("pages")
    time = [1000]
    before = phases._now
    phases._now = lambda: time[0]
    hot.core.set_clock(lambda: time[0])
    try:
        pages = [
            StatusPage(
                str(directory / name), rank=0, world_size=1, local_rank=0, restart=0, started=5
            )
            for name in ("python", "compiled")
        ]
        pair = [phases.Phases(pages[0]), hot.core.Phases(pages[1])]
        # Each has its own idea of the time of day.
        offset = pair[0].unix - pair[1].unix
        sites = [[Site(f"/job/train.py{n}", n) for n in range(3)] for _ in pair]
        error = ValueError("no")
        for name, phase, took in steps:
            time[0] += took
            answers = [
                follow(one, name, phase, lines[phase % 3], error)
                for one, lines in zip(pair, sites, strict=True)
            ]
            assert answers[0] == answers[1], name
            for shown in SHOWN:
                assert getattr(pair[0], shown) == getattr(pair[1], shown), (name, shown)
        passes = [
            [(began, ended and ended, site.line) for began, ended, site in one.backwards]
            for one in pair
        ]
        assert [
            (began - offset, ended and ended - offset, line) for began, ended, line in passes[0]
        ] == passes[1]
        python, compiled = (bytes(each.memory[:PAGE_SIZE]) for each in pages)
        assert python[:136] == compiled[:136], "all up to the time of the last change"
        assert python[144:] == compiled[144:]
        recorded = [[each.recorded for each in lines] for lines in sites]
        assert recorded[0] == recorded[1]
    finally:
        phases._now = before
        hot.core.set_clock(None)


def test_a_page_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        hot.core.Phases(SimpleNamespace(memory=bytearray(PAGE_SIZE - 1)))
    with pytest.raises(AttributeError):
        hot.core.Phases(None)


def test_what_is_watched_is_noticed_once() -> None:
    for make in (phases.Phases, hot.core.Phases):
        page = page_of_memory()
        page.show = lambda *_: None
        one: Any = make(page)
        memory = bytearray(64)
        one.watch(memory, 8)
        assert not one.noticed()
        memory[9] = 1
        assert (one.noticed(), one.noticed()) == (True, False)
        with pytest.raises((ValueError, TypeError)):
            one.watch(bytearray(4), 0)


def test_phases_nested_without_end_are_left_again() -> None:
    one = hot.core.Phases(page_of_memory())
    site = Site("/job/train.py", 3)
    for _ in range(1000):
        assert one.enter(int(Phase.WAIT), site)
    for _ in range(1000):
        one.leave()
    assert one.phase == Phase.OTHER
    one.leave()
    assert one.phase == Phase.OTHER


# -- calls around a function


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a function with calls of ours around it, in a rank."""
    monkeypatch.setattr(rank, "active", SimpleNamespace())
    monkeypatch.setattr(shield, "faults", [])
    monkeypatch.setattr(shield, "_report", None)

    def make(function: Any, begin: Any, end: Any) -> Any:
        owner = SimpleNamespace(function=function)
        wrapping.around(owner, "function", "a hook", begin, end)
        return owner.function

    yield make
    shield.off.discard("a hook")


def test_what_is_called_keeps_its_name_result_and_arguments(around: Callable[..., Any]) -> None:
    seen: list[Any] = []

    def scale(value: int, *, factor: int = 2) -> int:
        """Scale it."""
        return value * factor

    def begins(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return "begun"

    call = around(
        scale,
        begins,
        lambda begun, result, error: seen.append((begun, result, error)),
    )
    assert (call.__name__, call.__doc__, call.__wrapped__) == ("scale", "Scale it.", scale)
    assert call(3, factor=5) == 15
    assert seen == [((3,), {"factor": 5}), ("begun", 15, None)]


def scaled(value: int) -> int:
    """Scale it."""
    return 2 * value


def test_what_is_called_is_copied_pickled_and_referred_to_as_a_function(
    around: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = around(scaled, lambda _: True, lambda *_: None)
    monkeypatch.setattr(sys.modules[__name__], "scaled", call)
    assert weakref.ref(call)() is call
    assert copy.deepcopy([call]) == copy.copy([call]) == [call]
    assert pickle.loads(pickle.dumps(call)) is call
    assert str(inspect.signature(call)) == "(value: 'int') -> 'int'"


def test_an_exception_flies_through_without_a_frame_of_ours(around: Callable[..., Any]) -> None:
    ends: list[Any] = []

    def fails() -> None:
        raise KeyError("mine")

    call = around(fails, lambda: True, lambda *end: ends.append(end))
    with pytest.raises(KeyError) as raised:
        call()
    assert [each.name for each in raised.traceback] == [
        "test_an_exception_flies_through_without_a_frame_of_ours", "fails",
    ]  # fmt: skip
    ((begun, result, error),) = ends
    assert (begun, result) == (True, None)
    assert error is raised.value


def test_a_fault_of_ours_is_noted_and_the_call_goes_on(around: Callable[..., Any]) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("ours")

    begins = around(lambda: "result", broken, lambda *_: None)
    assert begins() == "result"
    assert shield.faults == [("a hook", "RuntimeError('ours')")]
    shield.off.clear()
    shield.faults.clear()
    ends = around(lambda: "result", lambda: True, broken)
    assert ends() == "result"
    assert shield.faults == [("a hook", "RuntimeError('ours')")]
    assert ends() == "result", "off from now on"


def test_ctrl_c_within_a_hook_is_the_jobs(around: Callable[..., Any]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        around(lambda: "result", interrupted, lambda *_: None)()
    with pytest.raises(KeyboardInterrupt):
        around(lambda: "result", lambda: True, interrupted)()
    assert shield.faults == []


class TimeLimit:
    """A handler of signals, as a bound method."""

    def over(self, number: int, frame: object) -> None:
        raise TimeoutError("the job's")


def test_a_subscriber_that_raises_is_called_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """With whatever it is called; what is no error is the job's own."""
    monkeypatch.setattr(shield, "faults", [])
    monkeypatch.setattr(shield, "_report", None)
    seen: list[Any] = []

    def subscriber(*args: Any, error: type[BaseException] | None = None) -> str:
        seen.append(args)
        if error is not None:
            raise error("it")
        return "ignored"

    call = events.shielded(subscriber)
    call(1, 2)
    with pytest.raises(KeyboardInterrupt):
        call(3, error=KeyboardInterrupt)
    call(4, error=KeyError)
    call(5)
    assert seen == [(1, 2), (3,), (4,)]
    name = shield.name_of(subscriber)
    assert (shield.faults, shield.off) == ([(name, "KeyError('it')")], {name})
    shield.off.clear()


def test_a_subscriber_is_let_go() -> None:
    class Follower:
        def __init__(self) -> None:
            self.call = events.shielded(self.follow)

        def follow(self) -> None:
            """Part of a cycle, as observers are."""

    gone = weakref.ref(Follower())
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["function", "method", "partial"])
def test_what_a_signal_handler_raises_within_a_hook_is_the_jobs(
    kind: str, around: Callable[..., Any]
) -> None:
    def over(number: int, frame: object) -> None:
        raise TimeoutError("the job's")

    def alarmed(*_: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    handlers: dict[str, Any] = {
        "function": over,
        "method": TimeLimit().over,
        "partial": functools.partial(over),
    }
    before = signal.signal(signal.SIGALRM, handlers[kind])
    try:
        with pytest.raises(TimeoutError, match="the job's"):
            around(lambda: "result", alarmed, lambda *_: None)()
        with pytest.raises(TimeoutError, match="the job's"):
            around(lambda: "result", lambda: True, alarmed)()
        with pytest.raises(TimeoutError, match="the job's"):
            shield.shielded(alarmed)()
        with pytest.raises(TimeoutError, match="the job's"):
            events.shielded(alarmed)()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (shield.faults, shield.off) == ([], set())


def test_a_function_of_a_class_stays_a_method(around: Callable[..., Any]) -> None:
    class Loader:
        def next(self, count: int) -> tuple[Any, int]:
            return self, count

    seen: list[Any] = []
    wrapping.around(Loader, "next", "a hook", lambda *args: seen.append(args), lambda *_: None)
    loader = Loader()
    assert loader.next(3) == (loader, 3)
    assert seen == [(loader, 3)]
