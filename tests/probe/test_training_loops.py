"""What is known of a loop over batches by its records, and of one that was never closed."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.loops.training_loops import Trace, place_of, traces_of, trained_on
from ddpdoctor.run.names import BEFORE_FORWARD
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.status import Phase
from tests.support.crash_records import error
from tests.support.loop_jobs import BACKWARD, BREAK, FORWARD, HEADER, Job
from tests.support.written import SECOND, T0, Written


@pytest.fixture
def job(written: Written) -> Job:
    return Job(written)


def trace(job: Job, *records: JsonObject, exited: int | None = None, **page: Any) -> Trace:
    """The only loop of a rank, as it is seen a long time later."""
    job.written.rank(0, records, **{"phase": Phase.FORWARD, "reduced": 12, "steps": 11, **page})
    if exited is not None:
        job.written.exit(0, exited, T0 + 60 * SECOND)
    job.written.findings()
    run = RunReader(job.written.path).snapshot()
    (found,) = traces_of(run.ranks[0], run)
    return found


def raised(job: Job, *lines: int, path: str = "", **more: object) -> JsonObject:
    """An exception that passed these lines, the outermost first."""
    frames = [[path or job.path, line, "train"] for line in lines]
    return error("ValueError", "bad", T0, user_frames=frames, **more)


def test_a_loop_that_goes_on(job: Job) -> None:
    found = trace(job, job.loop(before=2))
    assert (found.state, found.closed, found.fetched, found.reached) == (
        "trains",
        False,
        None,
        None,
    )
    assert (found.before, found.step, found.idle) == (2, 11, {})


def test_a_loop_that_was_closed(job: Job) -> None:
    end = job.over("ended", 9, 10, idle=[[5, 5, True]], idled=1)
    found = trace(job, job.loop(before=2), end)
    assert (found.state, found.closed, found.fetched, found.reached) == ("ended", True, 9, 8)
    assert found.step == 10
    assert found.idle[5].forward and found.frames == (Location(job.path, HEADER),)


@pytest.mark.parametrize(
    ("page", "state", "reached"),
    [
        ({"phase": Phase.BACKWARD}, "trains", 10),
        ({"phase": Phase.WAIT}, "trains", 10),
        ({"phase": Phase.WAIT, "collective": BEFORE_FORWARD[0]}, "trains", 11),
        ({"phase": Phase.FORWARD}, "trains", None),
        ({"phase": Phase.BACKWARD, "since": 1 << 62}, "trains", None),
        ({"phase": Phase.FORWARD, "exited": -9}, "failed", 10),
        ({"phase": Phase.BACKWARD, "exited": -9}, "failed", 10),
    ],
    ids=str,
)
def test_how_far_an_open_loop_has_come(
    job: Job, page: dict[str, Any], state: str, reached: int | None
) -> None:
    """Known only of a rank that is in one collective for long, or has died."""
    found = trace(job, job.loop(before=2), {**job.loop(), "idle": [[3, 3, True]]}, **page)
    assert (found.state, found.reached) == (state, reached)
    fetched = 10 + 1 if state == "failed" else None
    assert found.fetched == fetched
    assert found.died is (state == "failed")


def test_a_rank_that_ended_or_raised_has_not_died(job: Job) -> None:
    end: JsonObject = {"kind": "end", "time": T0, "steps": 4, "armed": 4}
    assert not trace(job, job.loop(), end, exited=0).died


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ((90, FORWARD), "failed"),
        ((FORWARD, 3), "failed"),
        ((90, BACKWARD), "left"),
        ((FORWARD + 40,), "left"),
    ],
)
def test_a_loop_that_the_exception_left(job: Job, lines: tuple[int, ...], state: str) -> None:
    """Its iterator was released at the line that the exception passed."""
    left = job.over("left", 9, 10, left_at=FORWARD)
    assert trace(job, job.loop(), left, raised(job, *lines)).state == state


@pytest.mark.parametrize(
    ("recorded", "line", "path", "state"),
    [
        ("failed", FORWARD, "", "failed"),
        ("failed", HEADER, "", "failed"),
        ("failed", 90, "", "left"),
        ("failed", FORWARD, "/job/other.py", "left"),
        ("left", FORWARD, "", "left"),
        ("ended", FORWARD, "", "ended"),
    ],
)
def test_a_loop_whose_iterator_outlived_it(
    job: Job, recorded: str, line: int, path: str, state: str
) -> None:
    end = job.over(recorded, 9, 10)
    assert trace(job, job.loop(), end, raised(job, line, path=path)).state == state


def test_a_broadcast_in_front_of_a_forward_is_a_step_begun(job: Job) -> None:
    """The one that failed in it wanted another step."""
    end = job.over("failed", 9, 10)
    bad = raised(job, FORWARD, collective=BEFORE_FORWARD[0])
    assert trace(job, job.loop(before=2), end, bad).reached == 9


def test_a_backward_that_failed_is_counted_already(job: Job) -> None:
    end = job.over("failed", 9, 10)
    bad = raised(job, FORWARD, collective="backward's all-reduce")
    assert trace(job, job.loop(before=2), end, bad).reached == 8


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"state": "ended", "fetched": 9, "after": 8}, True),
        ({"state": "left", "fetched": 9, "after": 8}, True),
        # It took fewer batches, passed that one over, or made no step.
        ({"state": "ended", "fetched": 5, "after": 5}, False),
        ({"state": "ended", "fetched": 6, "after": 5}, True),
        ({"state": "ended", "fetched": 9, "after": 8, "idle": [[5, 5, True]]}, False),
        ({"state": "left", "fetched": 9, "after": 0}, False),
        ({"state": "ended", "fetched": 9, "after": 0}, True),
    ],
    ids=str,
)
def test_whether_a_rank_trained_on_a_batch(job: Job, facts: dict[str, Any], expected: bool) -> None:
    end = {"kind": "loop", "loop": 0, "time": T0, "step": 8, **facts}
    assert trained_on(5, [trace(job, job.loop(), end)]) is expected


def test_a_loop_is_found_by_its_innermost_line(job: Job) -> None:
    at = [Location("/lib/loader.py", 9), Location(job.path, HEADER), Location(job.path, 2)]
    place = place_of(at)
    assert place is not None
    assert place.location == Location(job.path, HEADER)
    assert [loop.lineno for _, _, loop in place.outer] == [2]
    assert [place.runs_at(line) for line in (2, HEADER, BREAK, 10)] == [False, True, True, False]
    assert place_of(at[:1]) is None
    assert place_of([Location(job.path, BACKWARD)]) is None
