"""Samples of the training thread's stack: the right line, at a small cost, and nothing else."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.diagnose.speed.stack_samples import Profile, spot
from ddpdoctor.probe.observers import stack_sampling
from ddpdoctor.probe.runtime.budget import Budget
from ddpdoctor.run.mapped import MAX_PROFILES, PROFILE, RequestWriter
from ddpdoctor.run.records.base import JsonObject, json_line
from ddpdoctor.run.records.training import ProfileRecord
from ddpdoctor.run.records.typed_json import parse
from tests.support.probed import a_rank

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counters are Linux's")


def state(added: list[JsonObject], budget: float = 0.5) -> Any:
    return a_rank(
        added,
        Budget(budget),
        thread=threading.get_ident(),
        native=threading.get_native_id(),
        last_total=0,
        phase=1,
    )


def sampled(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> JsonObject:
    """What is seen of this thread while it works, in steps."""
    monkeypatch.setattr(stack_sampling, "MIN_INTERVAL", 0.005)
    added: list[JsonObject] = []
    one = state(added)
    thread = threading.Thread(target=stack_sampling.Sampler(one, 1).run)
    thread.start()
    while thread.is_alive():
        work()
        one.tracker.steps += 1
    (record,) = added
    return record


def profile(record: JsonObject) -> ProfileRecord:
    """A record as it is read back."""
    found = parse(json_line(record))
    assert isinstance(found, ProfileRecord)
    return found


def busy() -> int:
    return sum(number * number for number in range(3_000))


def idle() -> None:
    time.sleep(0.002)  # the line


def collect() -> None:
    gc.collect()


def test_the_line_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    record = profile(sampled(idle, monkeypatch))
    assert record.samples == stack_sampling.SAMPLES
    one = Profile(0, record)
    other = Profile(1, profile(sampled(busy, monkeypatch)))
    found = spot(one, [other], 0.3)
    assert found is not None
    line = idle.__code__.co_firstlineno + 1
    assert (found.frame.path, found.frame.line, found.function) == (__file__, line, "idle")
    assert found.others == 0
    found = spot(other, [one], 0.3)
    assert found is not None
    assert found.function == "busy"


@linux
def test_sleep_and_work_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps, works = sampled(idle, monkeypatch), sampled(busy, monkeypatch)
    letters = [
        {letter: sum(each[0] for each in record["stacks"] if each[3] == letter) for letter in "RS"}
        for record in (sleeps, works)
    ]
    # On a busy machine who sleeps waits for a core, too, whenever it wakes up.
    slept = [each["S"] / (each["R"] + each["S"]) for each in letters]
    assert slept[0] > slept[1]
    assert works["ran"] > sleeps["ran"]


@pytest.mark.slow
def test_garbage_collections_are_counted_while_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(gc.callbacks)
    record = sampled(collect, monkeypatch)
    assert record["gc"] > 0
    assert gc.callbacks == before


def test_no_frame_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor would live as long as a frame that holds it."""
    kept: list[Any] = []
    original = stack_sampling.Sampler._record

    def record(self: stack_sampling.Sampler) -> ProfileRecord:
        kept.extend(self._samples)
        return original(self)

    monkeypatch.setattr(stack_sampling.Sampler, "_record", record)
    sampled(busy, monkeypatch)
    assert kept
    held = [each for sample in kept for each in gc.get_referents(sample)]
    assert not [each for each in held if type(each).__name__ == "frame"]


def test_a_rank_that_ends_writes_what_it_has(tmp_path: Path) -> None:
    added: list[JsonObject] = []
    page = RequestWriter(str(tmp_path), PROFILE)
    profiles = stack_sampling.Profiles(state(added), str(tmp_path))
    page.ask(7)
    profiles.look()
    profiles.rank_ends()
    page.close()
    assert [each["asked"] for each in added] == [7]
    assert profiles._running is not None and profiles._running.over


def test_a_pause_between_steps_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader workers that start, an evaluation: no line of theirs is one of a step."""
    monkeypatch.setattr(stack_sampling, "MIN_INTERVAL", 0.005)
    added: list[JsonObject] = []
    one = state(added)
    thread = threading.Thread(target=stack_sampling.Sampler(one, 1).run)
    thread.start()
    # Longer than all samples would take.
    time.sleep(stack_sampling.MAX_ATTEMPTS * stack_sampling.SAMPLES * 0.005 * 1.2)
    while thread.is_alive():
        busy()
        one.tracker.steps += 1
    (record,) = added
    assert record["steps"] > 0
    assert record["samples"] == stack_sampling.SAMPLES
    steps = [each for each in record["stacks"] if busy.__name__ in {frame[2] for frame in each[1]}]
    assert sum(each[0] for each in steps) > stack_sampling.SAMPLES / 2


def test_intervals_are_the_same_each_time_and_not_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an RNG nor the rhythm of the steps has a part in them."""
    monkeypatch.setattr(stack_sampling, "STEP_TIMEOUT", 0.0)
    waits: list[list[float]] = []
    for _ in range(2):
        sampler = stack_sampling.Sampler(state([]), 1)
        waited: list[float] = []

        def wait(seconds: float, waited: list[float] = waited) -> bool:
            waited.append(round(seconds, 9))
            return False

        sampler._stop.wait = wait  # type: ignore[method-assign, assignment]
        sampler.run()
        waits.append(waited)
    assert waits[0] == waits[1]
    # No step was closed meanwhile: they are taken once more, and once more.
    assert len(waits[0]) == stack_sampling.MAX_ATTEMPTS * stack_sampling.SAMPLES
    first = waits[0][: stack_sampling.SAMPLES]
    assert len(set(first)) == stack_sampling.SAMPLES
    assert sum(first) == pytest.approx(
        stack_sampling.MIN_INTERVAL * stack_sampling.SAMPLES, rel=0.05
    )


@pytest.mark.parametrize(("budget", "taken"), [(0.5, MAX_PROFILES), (0.0, 0)])
def test_profiles_are_few(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, budget: float, taken: int
) -> None:
    page = RequestWriter(str(tmp_path), PROFILE)
    profiles = stack_sampling.Profiles(state([], budget), str(tmp_path))
    started: list[object] = []

    def start() -> None:
        started.append(1)
        assert profiles._running is not None
        profiles._running.over = True

    thread = SimpleNamespace(start=start)
    monkeypatch.setattr(stack_sampling, "background", lambda name, target: thread)
    for number in range(1, 8):
        page.ask(number)
        profiles.look()
        profiles.look()
    page.close()
    assert len(started) == taken
