"""Where a rank is that is outside of all phases for long."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ddpdoctor.probe.observers import own_work
from ddpdoctor.probe.observers.own_work import OwnWork
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.status import Phase
from tests.support.probed import a_rank

SECOND = 1_000_000_000


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[JsonObject]]:
    """The tracker, a look at a number of seconds, and what was written."""
    records: list[JsonObject] = []
    thread = threading.get_ident()
    state = a_rank(records, phase=int(Phase.OTHER), last_change=10 * SECOND, thread=thread)
    state.recorder.is_writing = True  # type: ignore[misc]
    own = OwnWork(state)

    def look(seconds: float) -> None:
        monkeypatch.setattr("time.time_ns", lambda: int(seconds * SECOND))
        own.look()

    return state.tracker, look, records


def test_looks_double(looks: tuple[Any, Any, list[JsonObject]]) -> None:
    tracker, look, records = looks
    for second in range(10, 31):
        look(second)
    assert [(each["time"] - each["since"]) // SECOND for each in records] == [2, 4, 8, 16]
    path, _ = records[0]["frames"][0]
    assert path == __file__
    # Another stretch of work begins.
    tracker.last_change = 30 * SECOND
    look(31)
    look(32)
    assert len(records) == 5


@pytest.mark.parametrize("phase", [Phase.DATA, Phase.WAIT, Phase.BACKWARD, Phase.ENDED])
def test_phases_have_lines_of_their_own(
    looks: tuple[Any, Any, list[JsonObject]], phase: Phase
) -> None:
    tracker, look, records = looks
    tracker.phase = int(phase)
    look(20)
    assert not records


def test_a_rank_that_works_for_ever_writes_little(
    looks: tuple[Any, Any, list[JsonObject]],
) -> None:
    tracker, look, records = looks
    for number in range(200):
        tracker.last_change = number * 10 * SECOND
        look(number * 10 + 3)
    assert len([each for each in records if each["kind"] == "own_work"]) == own_work.MAX_RECORDS
