"""Steps that wait for data (DDP611), what counts as a surplus, and the clocks of nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.speed.pace import own_time, stands_out
from ddpdoctor.render.chrome_trace import clock_offsets
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank
from tests.support.straggling import rank
from tests.support.written import MS, T0, Written

LOADS: JsonObject = {"kind": "site", "phase": "data", "path": "/job/train.py", "line": 7}


def fed(
    data: float, *, total: float = 100, waited: float = 0, first: int = 10, count: int = 20
) -> list[JsonObject]:
    """Steps of milliseconds that wait for data."""
    steps: list[JsonObject] = [
        {
            "kind": "step", "step": number, "start": T0 + int(number * total * MS),
            "data": int(data * MS), "total": int(total * MS), "waited": int(waited * MS),
        }
        for number in range(first, first + count)
    ]  # fmt: skip
    return [LOADS, *steps]


def starved_of_data(written: Written, *each: list[JsonObject]) -> list[Finding]:
    for number, records in enumerate(each):
        rank(written, number, records)
    return [found for found in written.findings(status=0) if found.code == "DDP611"]


def test_ranks_that_wait_for_their_data_are_reported(written: Written) -> None:
    (finding,) = starved_of_data(written, fed(30), fed(40))
    assert (finding.ranks, finding.severity) == ((0, 1), Severity.WARNING)
    assert finding.message == ("both ranks wait for data 40 % of every step (40.0 ms of 100 ms)")
    assert finding.evidence == ("rank 0: 30 %, 30.0 ms a step", "rank 1: 40 %, 40.0 ms a step")
    assert finding.location == Location("/job/train.py", 7)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((30, 30, 30), "all 3 ranks wait"),
        ((30, 30, 5), "ranks 0 and 1 wait"),
        ((30,), "rank 0 waits"),
        ((30, 5), ""),
        ((30, 5, 5), ""),
    ],
)
def test_most_ranks_have_to_wait(written: Written, data: Sequence[float], words: str) -> None:
    found = starved_of_data(written, *map(fed, data))
    assert [each.message.partition(" for data")[0] for each in found] == ([words] if words else [])


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (fed(25, total=100), 1),
        (fed(20, total=100), 0),
        (fed(1, total=4), 1),
        (fed(0.999, total=4), 0),
        (fed(30, count=19), 0),
        # The first ten steps fill caches.
        (fed(30, first=9), 0),
        # The workers of the loader get no core, either.
        (fed(30, waited=4.9), 1),
        (fed(30, waited=5), 0),
    ],
)
def test_waits_that_are_worth_a_word(
    written: Written, steps: list[JsonObject], expected: int
) -> None:
    assert len(starved_of_data(written, steps, steps)) == expected


@pytest.mark.parametrize(
    ("gap", "total", "relief", "expected"),
    [
        (15 * MS, 100 * MS, 7.5 * MS, True),
        (14.9 * MS, 100 * MS, 14 * MS, False),
        (15 * MS, 100 * MS, 7.4 * MS, False),
        (1 * MS, 5 * MS, 1 * MS, True),
        (0.9 * MS, 5 * MS, 1 * MS, False),
    ],
)
def test_a_surplus_that_stands_out(gap: float, total: float, relief: float, expected: bool) -> None:
    assert stands_out(gap, total, relief) is expected


@pytest.mark.parametrize(
    ("own", "cpu", "waited", "expected"), [(9, 2, 4, 5), (9, 7, 4, 7), (9, 12, 4, 9), (9, 0, 0, 9)]
)
def test_a_steps_own_time_is_at_least_what_its_thread_ran(
    own: float, cpu: float, waited: float, expected: float
) -> None:
    assert own_time(own, cpu, waited) == expected


# -- clocks


def on(number: int, host: str) -> Rank:
    return Rank(number, 0, None, OpenRecord(format=1, rank=number, host=host))


def ending(*moments: int, first: int = 0) -> list[StepRecord]:
    """Steps whose all-reduce ended then, however long what came before it took."""
    return [
        StepRecord(
            step=number, start=moment - 10, data=1, forward=2, backward=3, wait=4, total=99,
            optimizer=7,
        )
        for number, moment in enumerate(moments, first)
    ]  # fmt: skip


def test_how_far_the_clock_of_a_node_is_ahead() -> None:
    ranks = [on(0, "a"), on(1, "a"), on(2, "b")]
    steps = {0: ending(100, 200, 300), 1: ending(102, 202, 302), 2: ending(601, 703, 801)}
    assert clock_offsets(ranks, steps) == {"a": 0, "b": 500}


@pytest.mark.parametrize(("first", "expected"), [(0, 500), (1, 400), (2, 0)])
def test_nodes_that_share_too_few_steps_are_taken_to_be_right(first: int, expected: int) -> None:
    steps = {0: ending(100, 200, 300, 400), 1: ending(600, 700, 800, 900, first=first)}
    assert clock_offsets([on(0, "a"), on(1, "b")], steps) == {"a": 0, "b": expected}


def test_a_node_without_steps_is_taken_to_be_right() -> None:
    assert clock_offsets([], {}) == {}
    assert clock_offsets([on(0, "a"), on(1, "b")], {0: ending(100, 200, 300)}) == {"a": 0, "b": 0}
