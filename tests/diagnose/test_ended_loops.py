"""A loop whose loader, of unknown length, ended earlier on one rank (DDP109)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.core.user_code import Location
from tests.support.loop_jobs import HEADER, Job
from tests.support.written import Written


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(Written(tmp_path))


def test_the_loop_is_named_with_both_counts(job: Job) -> None:
    job.waits(0, [job.loop()], reduced=21)
    job.ends(1, [job.loop(), job.over("ended", 20, 20)], reduced=20)
    (finding,) = job.findings()
    assert (finding.code, finding.ranks) == ("DDP109", (1,))
    assert finding.location == Location(job.path, HEADER)
    assert finding.message.startswith("rank 1 ran out of batches before the others: the loop at ")
    assert finding.message.endswith("ended after 20 batches (step 20), and rank 0 went on")


@pytest.mark.parametrize("why", ["equal", "joined", "still in it", "not stuck"])
def test_loops_of_which_that_is_not_known(job: Job, why: str) -> None:
    loop = job.loop(joins=why == "joined")
    job.waits(
        0, [loop], reduced=20 if why == "equal" else 21, seconds=1 if why == "not stuck" else 9
    )
    over = [] if why == "still in it" else [job.over("ended", 20, 20)]
    job.ends(1, [loop, *over], reduced=20)
    assert "DDP109" not in job.codes()
