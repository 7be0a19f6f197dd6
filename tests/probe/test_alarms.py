"""What is to be called before the training step of some number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import pytest

from ddpdoctor.probe.runtime import events, shield


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_alarms", [])
    monkeypatch.setattr(events, "due", events.NEVER)
    monkeypatch.setattr(shield, "off", set())
    monkeypatch.setattr(shield, "faults", [])


def test_each_is_called_once_and_in_order() -> None:
    called: list[str] = []
    for number, name in ((7, "c"), (3, "a"), (3, "b"), (9, "d")):
        events.before_step(number, partial(called.append, name))
    assert events.due == 3
    events.ring(7)
    assert (called, events.due) == (["a", "b", "c"], 9)
    events.ring(9)
    assert (called, events.due) == (["a", "b", "c", "d"], events.NEVER)


def test_what_is_asked_for_meanwhile_is_called_at_the_next_step() -> None:
    called: list[int] = []

    def again() -> None:
        called.append(len(called))
        events.before_step(0, again)

    events.before_step(1, again)
    for number in range(1, 4):
        events.ring(number)
        assert called == list(range(number))
        assert events.due == 0


def test_the_last_ones_come_when_the_others_are_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    @contextlib.contextmanager
    def spending() -> Iterator[None]:
        called.append("clock")
        yield
        called.append("paid")

    monkeypatch.setattr(events, "spending", spending)
    events.before_step(1, partial(called.append, "last"), last=True)
    events.before_step(1, partial(called.append, "first"))
    events.ring(1)
    assert called == ["clock", "first", "paid", "last"]


def test_one_that_fails_is_a_fault_and_keeps_no_other_from_its_turn() -> None:
    called: list[str] = []

    def fails() -> None:
        called.append("fails")
        raise KeyError("it")

    events.before_step(1, fails)
    events.before_step(1, lambda: called.append("next"))
    events.ring(1)
    events.before_step(2, fails)
    events.ring(2)
    assert called == ["fails", "next"], "not again"
    assert [what for _, what in shield.faults] == ["KeyError('it')"]


def test_ctrl_c_in_one_leaves_the_others_for_the_next_step() -> None:
    called: list[str] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    events.before_step(1, interrupted)
    events.before_step(1, lambda: called.append("next"))
    events.before_step(1, lambda: called.append("last"), last=True)
    with pytest.raises(KeyboardInterrupt):
        events.ring(1)
    assert (called, events.due) == ([], 1)
    events.ring(2)
    assert (called, events.due) == (["next", "last"], events.NEVER)
