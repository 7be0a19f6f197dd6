"""DDP307: gradients are accumulated, and every backward is reduced."""

from __future__ import annotations

import pytest

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.training import IdleBatch, LoopRecord, SiteRecord
from tests.support.written import Written

LINE = Location("/job/train.py", 24)


def loop(
    batches: int = 16, steps: int = 4, reduced: int = 16, state: str = "ended", idle: int = 0
) -> list[LoopRecord | SiteRecord]:
    """What a rank writes of an epoch."""
    idled = tuple(IdleBatch(number, 0, False) for number in range(idle))
    return [
        LoopRecord(time=1, loop=0, state="trains", step=3, frames=(LINE,), before=7),
        SiteRecord(phase="backward", path="/job/train.py", line=26),
        LoopRecord(
            time=2,
            loop=0,
            state=state,
            step=3 + steps,
            fetched=batches,
            after=7 + reduced,
            idle=idled,
            idled=idle,
        ),
    ]


def test_batches_that_are_each_reduced_are_named_with_the_backward(written: Written) -> None:
    written.rank(0, loop())
    written.rank(1, loop())
    (finding,) = written.findings()
    assert (finding.code, finding.ranks) == ("DDP307", (0, 1))
    assert str(finding.location) == "/job/train.py:26"
    assert "takes 4 batches" in finding.message
    assert finding.evidence == (
        "rank 0: 16 batches, 4 optimizer steps, 16 reduced backwards in a loop",
    )


def test_what_the_reductions_cost_is_shown_where_ddp_times_them(written: Written) -> None:
    timed: list[JsonObject] = [
        {"kind": "step", "step": number, "start": 1, "total": total, "wait": 25, "split": split}
        for number, (total, split) in enumerate([(100, True), (50, True), (100, True), (25, False)])
    ]
    written.rank(0, [*loop(), *timed])
    written.rank(1, loop())
    (finding,) = written.findings()
    assert finding.evidence[1:] == ("rank 0 waits for reductions 25 % of a step",)


def test_twice_as_many_batches_as_steps_are_enough(written: Written) -> None:
    written.rank(0, loop(batches=8, reduced=8))
    written.rank(1, loop(batches=8, reduced=8))
    (finding,) = written.findings()
    assert "takes 2 batches" in finding.message


def test_batches_without_a_backward_count_for_nothing(written: Written) -> None:
    written.rank(0, loop(idle=2, reduced=14))
    written.rank(1, loop(idle=2, reduced=14))
    assert [each.code for each in written.findings()] == ["DDP307"]


@pytest.mark.parametrize(
    "other",
    [
        loop(reduced=4),
        loop(reduced=15),
        loop(batches=7, reduced=7),
        loop(steps=3),
        loop(batches=16, steps=16),
        loop(state="left"),
        loop(idle=9, reduced=16),
        loop()[:2],
        [],
    ],
    ids=["sums", "most", "few", "short", "each", "left", "idle", "goes on", "no loop"],
)
def test_a_rank_that_does_otherwise_is_enough_for_silence(
    written: Written, other: list[LoopRecord | SiteRecord]
) -> None:
    written.rank(0, loop())
    written.rank(1, other)
    assert "DDP307" not in [each.code for each in written.findings()]
