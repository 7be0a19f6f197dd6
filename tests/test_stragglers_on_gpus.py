"""Stragglers among ranks on GPUs (DDP610), where DDP times every hundredth backward."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ddpdoctor.run.records.base import JsonObject
from tests.straggling import rank
from tests.written import MS, T0, Written

BUILT: JsonObject = {"kind": "ddp", "device": "cuda:0", "group_ranks": [0, 1]}


def steps(other: float, backward: float, count: int = 60, **more: object) -> Iterable[JsonObject]:
    """Steps of milliseconds, as the GPU's events have them: backward holds the wait, too."""
    for number in range(count):
        yield {
            "kind": "step", "step": number, "start": T0 + int(number * 110 * MS), "split": False,
            "other": int(other * MS), "backward": int(backward * MS),
            "total": int((other + backward) * MS), **more,
        }  # fmt: skip


def codes(written: Written, *each: Iterable[JsonObject]) -> list[tuple[str, tuple[int, ...]]]:
    for number, records in enumerate(each):
        rank(written, number, [BUILT, *records])
    found = written.findings(status=0)
    return [(one.code, one.ranks) for one in found if one.code == "DDP610"]


def test_who_does_not_wait_in_its_backward_holds_the_others_up(written: Written) -> None:
    # Measured where rank 1 slept for 0.1 s a step; its host spins while a GPU waits.
    first, second = steps(27.6, 81.3, cpu=107 * MS), steps(92.8, 16.0, cpu=8 * MS)
    assert codes(written, first, second) == [("DDP610", (1,))]


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
