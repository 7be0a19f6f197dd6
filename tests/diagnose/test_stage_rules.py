"""Pipelines on written runs: the stage that holds the others up (DDP612), and replicas (DDP610)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.model import StageRecord
from tests.support.straggling import rank, steps
from tests.support.written import Written

LINE = Location("/job/train.py", 40)


def stage(number: int, of: int = 2, group: Sequence[int] = ()) -> JsonObject:
    return {
        "kind": StageRecord.kind, "stage": number, "stages": of, "group": list(group),
        "path": LINE.path, "line": LINE.line,
    }  # fmt: skip


def hybrid(
    written: Written,
    owns: Sequence[float],
    *,
    lacks: Sequence[float] = (0.0,) * 8,
    phase: str = "backward",
    last: int = 60,
) -> None:
    """Two stages, each on every second rank, with these own times in milliseconds."""
    for number, (own, lack) in enumerate(zip(owns, lacks, strict=False)):
        records: Iterable[JsonObject] = [
            stage(number % 2, group=(number // 2 * 2, number // 2 * 2 + 1)),
            *steps(own, max(owns) + 5 - own, own - lack, lack, phase=phase, last=last),
        ]
        rank(written, number, records)


def test_a_stage_is_named_with_its_ranks_and_the_line_that_made_it(written: Written) -> None:
    hybrid(written, (20, 42, 20, 42))
    (finding,) = written.findings()
    assert (finding.code, finding.ranks, finding.location) == ("DDP612", (1, 3), LINE)
    assert finding.severity == Severity.WARNING
    assert finding.message == "stage 1 of 2 (ranks 1 and 3) needs 2.1x the time of stage 0"
    assert finding.evidence == (
        "own time 42.0 ms a step; stage 0 20.0 ms (medians of 50 steps)",
        "backward compute: 42.0 ms against 20.0 ms",
        "stage 0 waits 27.0 ms a step, stage 1 5.0 ms",
    )
    assert finding.fix.startswith("Move the cut: give stage 1 fewer layers.")
    assert "--split auto" in finding.fix


@pytest.mark.parametrize(("status", "found"), [(None, []), (0, [("DDP612", (0,))])])
def test_one_replica_is_enough_and_a_short_job_once_it_is_over(
    written: Written, status: int | None, found: list[tuple[str, tuple[int, ...]]]
) -> None:
    hybrid(written, (90, 10), last=12)
    assert [(each.code, each.ranks) for each in written.findings(status=status)] == found


@pytest.mark.parametrize(
    "owns", [(20, 34, 20, 34), (34, 20, 34, 20), (20, 20, 20, 20)], ids=["late", "early", "even"]
)
def test_stages_as_uneven_as_layers_make_them_are_left_alone(
    written: Written, owns: Sequence[float]
) -> None:
    hybrid(written, owns)
    assert written.findings(status=0) == []


def test_stages_that_lack_cores_are_left_alone(written: Written) -> None:
    hybrid(written, (40, 90, 40, 90), lacks=(25, 74, 25, 74), last=300)
    assert written.findings(status=0) == []


def test_twice_the_time_is_not_sure_among_longer_waits_for_cores(written: Written) -> None:
    hybrid(written, (493, 1282, 493, 1282), lacks=(376, 1047, 376, 1047))
    assert written.findings(status=0) == []


def test_more_work_is_found_on_a_crowded_machine(written: Written) -> None:
    hybrid(written, (60, 130, 60, 130), lacks=(50, 100, 50, 100))
    (finding,) = written.findings(status=0)
    assert (finding.code, finding.ranks) == ("DDP612", (1, 3))
    assert "needs 3.0x the time" in finding.message
    assert finding.evidence[-1].endswith("the machine is crowded")


def test_a_replica_is_compared_with_its_own_stage(written: Written) -> None:
    hybrid(written, (20, 30, 20, 60))
    (finding,) = written.findings(status=0)
    assert (finding.code, finding.ranks) == ("DDP610", (3,))
    assert finding.message.startswith(
        "rank 3 (stage 1 of 2) holds the other replicas up by 30.0 ms a step"
    )
    assert "own time 60.0 ms a step; the other replicas 30.0 ms (medians of 50 steps)" in (
        finding.evidence
    )


def test_a_stage_that_waits_for_data_needs_no_other_cut(written: Written) -> None:
    hybrid(written, (60, 20), phase="data")
    found = {each.code: each for each in written.findings(status=0)}
    assert found["DDP612"].message.endswith("the time of stage 1, for its data loading")
    assert "cut" not in found["DDP612"].fix


def test_ranks_with_several_stages_and_more_than_two_of_them(written: Written) -> None:
    for number, (mine, own) in enumerate([((0, 3), 20.0), ((1, 4), 60.0), ((2, 5), 22.0)]):
        built = [stage(each, of=6) for each in mine]
        rank(written, number, [*built, *steps(own, 70 - own, own - 0.5, 0.5, phase="forward")])
    (finding,) = written.findings(status=0)
    assert finding.ranks == (1,)
    assert finding.message == "stages 1 and 4 of 6 (rank 1) need 2.9x the time of the others"
    assert finding.fix.startswith("Move the cut: give stages 1 and 4 fewer layers.")


def test_where_a_rank_runs_no_stage_all_are_compared(written: Written) -> None:
    """It may still be about to build one."""
    for number, own in enumerate((20.0, 60.0)):
        built = [stage(number)] if number == 0 else []
        rank(written, number, [*built, *steps(own, 70 - own, own - 0.5, 0.5)])
    (finding,) = written.findings(status=0)
    assert (finding.code, finding.message[:32]) == ("DDP610", "rank 1 holds the others up by 40")


def test_pipelines_built_before_do_not_count(written: Written) -> None:
    for number, own in enumerate((20.0, 60.0)):
        built = [stage(number, of=4), stage(number + 2, of=4), stage(number)]
        rank(written, number, [*built, *steps(own, 70 - own, own - 0.5, 0.5)])
    (finding,) = written.findings(status=0)
    assert finding.message.startswith("stage 1 of 2 (rank 1) needs 3.1x")
