"""Stragglers among ranks on GPUs (DDP610), where DDP times every hundredth backward."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ddpdoctor.diagnose.speed.lag import lags, still_slower
from ddpdoctor.render.reporter import summary_lines
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import JsonObject
from tests.support.straggling import rank
from tests.support.written import MS, T0, Written


def built(*ranks: int) -> JsonObject:
    return {"kind": "ddp", "device": "cuda:0", "group_ranks": [*ranks]}


BUILT = built(0, 1)


def steps(other: float, backward: float, count: int = 60, **more: object) -> Iterable[JsonObject]:
    """Steps of milliseconds, as the GPU's events have them: backward holds the wait, too."""
    for number in range(count):
        yield {
            "kind": "step", "step": number, "start": T0 + int(number * 110 * MS), "split": False,
            "other": int(other * MS), "backward": int(backward * MS),
            "total": int((other + backward) * MS), **more,
        }  # fmt: skip


def codes(
    written: Written, *each: Iterable[JsonObject], built: JsonObject = BUILT
) -> list[tuple[str, tuple[int, ...]]]:
    for number, records in enumerate(each):
        rank(written, number, [built, *records])
    found = written.findings(status=0)
    return [(one.code, one.ranks) for one in found if one.code in ("DDP610", "DDP612")]


def test_who_does_not_wait_in_its_backward_holds_the_others_up(written: Written) -> None:
    # Measured where rank 1 slept for 0.1 s a step; its host spins while a GPU waits.
    first, second = steps(27.6, 81.3, cpu=107 * MS), steps(92.8, 16.0, cpu=8 * MS)
    assert codes(written, first, second) == [("DDP610", (1,))]


def test_where_no_clock_of_the_device_is_read_nobody_is_blamed(written: Written) -> None:
    first, second = steps(27.6, 81.3, cpu=107 * MS), steps(92.8, 16.0, cpu=8 * MS)
    assert codes(written, first, second, built={**BUILT, "device": "xpu:0"}) == []
    told = list(summary_lines(RunReader(written.path).snapshot()))
    assert any("what the xpu device does meanwhile is not known" in line for line in told), told


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((27.6, 81.3), (27.6, 81.3)),
        # One is slower in its backward, where the other waits: that only DDP's timers show.
        ((10.0, 100.0), (10.0, 100.5)),
        # Each waits for the other at another place.
        ((60.0, 50.0), (61.0, 49.0)),
    ],
)
def test_who_is_as_fast_as_the_others_is_left_alone(
    written: Written, first: tuple[float, float], second: tuple[float, float]
) -> None:
    assert codes(written, steps(*first), steps(*second)) == []


def test_a_few_steps_say_nothing(written: Written) -> None:
    assert codes(written, steps(27.6, 81.3, 12), steps(92.8, 16.0, 12)) == []


def test_ranks_of_other_groups_end_another_all_reduce(written: Written) -> None:
    """Their backwards have nothing to do with each other."""
    for number, group in enumerate(((0, 1), (0, 1), (2, 3), (2, 3))):
        times = (80.0, 20.0) if number < 2 else (20.0, 80.0)
        rank(written, number, [built(*group), *steps(*times)])
    assert [each.code for each in written.findings(status=0) if each.code == "DDP610"] == []


def test_backwards_that_are_not_reduced_wait_for_none(written: Written) -> None:
    """A step counts as split where there was nothing to time."""
    first, second = steps(50.0, 50.0, split=True), steps(70.0, 30.0, split=True)
    assert codes(written, first, second) == []


def test_stages_of_a_pipeline_have_backwards_of_their_own(written: Written) -> None:
    for number, times in enumerate(((90.0, 10.0), (30.0, 70.0))):
        stage = {"kind": "stage", "stage": number, "stages": 2}
        rank(written, number, [built(0, 1), stage, *steps(*times)])
    found = [each.code for each in written.findings(status=0)]
    assert not {"DDP610", "DDP612"} & {*found}


def test_a_backward_that_is_slow_itself_stays_slow(written: Written) -> None:
    """DDP's timers show it, in every hundredth step."""
    for number, (backward, wait) in enumerate(((50, 50), (100, 0))):
        records = [
            {**step, "split": True, "backward": backward * MS, "wait": wait * MS}
            if not index % 100
            else step
            for index, step in enumerate(steps(0.0, 100.0, 700))
        ]
        rank(written, number, [BUILT, *records])
    assert "DDP610" in [each.code for each in written.findings(status=0)]
    run = RunReader(written.path).snapshot()
    assert [each.rank.rank for each in lags(run)] == [1]
    assert still_slower(run, 1)
