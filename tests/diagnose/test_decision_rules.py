"""A rank that left its training loop (DDP403)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.run.names import BEFORE_FORWARD
from ddpdoctor.run.ring import RingWriter
from ddpdoctor.run.status import Phase
from tests.support.loop_jobs import ABORTED, AHEAD, BREAK, FORWARD, HEADER, Job
from tests.support.written import SECOND, T0, Written


@pytest.fixture
def job(written: Written) -> Job:
    return Job(written)


# -- a loop that was left


def test_a_rank_that_left_its_loop_while_another_waits(job: Job) -> None:
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    assert job.decided() == ((1,), BREAK)


def test_a_rank_that_had_ended_and_was_stopped_before_it_had_a_core_to_exit(job: Job) -> None:
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    # Its launcher stops it once rank 0 has failed.
    job.written.supervisor[-1].update(status=-15, time=T0 + 61 * SECOND)
    assert job.decided() == ((1,), BREAK)


def test_the_same_in_a_job_that_still_runs(job: Job) -> None:
    job.written.rank(0, [job.loop()], phase=Phase.BACKWARD, armed=13, steps=12, reduced=13)
    left = [job.loop(), job.over("left", 12, 12, left_at=BREAK)]
    job.written.rank(1, left, phase=Phase.WAIT, armed=12, steps=12, reduced=12)
    (finding,) = job.written.findings()
    assert (finding.code, finding.ranks) == ("DDP403", (1,))
    assert "in step 12, after 12 batches" in finding.message


def test_an_iterator_that_outlived_its_loop_leaves_the_statement_to_the_source(job: Job) -> None:
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12)], reduced=12)
    assert job.decided() == ((1,), BREAK)


def test_all_ranks_left_after_the_same_step(job: Job) -> None:
    for rank in (0, 1):
        job.ends(rank, [job.loop(), job.over("left", 12 + rank, 12, left_at=BREAK)], reduced=12)
    assert job.codes() == []


@pytest.mark.parametrize("left_at", [HEADER, 1])
def test_a_loop_that_no_statement_of_its_own_left(job: Job, left_at: int) -> None:
    """``islice`` or ``zip`` came to their end, or an exception flew and was caught."""
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=left_at)], reduced=12)
    assert job.codes() == ["DDP801"]


def test_within_join_anybody_may_leave(job: Job) -> None:
    loop = job.loop(joins=True)
    job.waits(0, [loop], reduced=13)
    job.ends(1, [loop, job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    assert "DDP403" not in job.codes()


def test_loops_begun_after_different_steps_are_not_compared(job: Job) -> None:
    job.waits(0, [job.loop(before=3)], reduced=16)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    assert "DDP403" not in job.codes()


def test_batches_taken_by_hand(written: Written) -> None:
    job = Job(written, "batches = iter(loader)\nwhile True:\n    step(next(batches))\n", 3)
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12)], reduced=12)
    assert job.codes() == ["DDP801"]


def test_without_the_source_nothing_is_claimed(job: Job) -> None:
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    Path(job.path).unlink()
    assert job.codes() == ["DDP801"]


def test_a_rank_that_failed_in_its_loop_decided_nothing(job: Job) -> None:
    failed = {
        "kind": "error", "time": T0, "exception": "ValueError", "message": "no", "traceback": "",
        "path": job.path, "line": FORWARD, "user_frames": [[job.path, FORWARD, "train"]],
    }  # fmt: skip
    job.waits(0, [job.loop()], reduced=13)
    job.written.rank(1, [job.loop(), job.over("failed", 13, 12), failed], reduced=12)
    job.written.exit(1, 1, T0)
    assert job.codes() == ["DDP901"]


def test_an_exception_lets_go_of_the_iterator_before_it_is_told(job: Job) -> None:
    failed = {
        "kind": "error", "time": T0 + 1, "exception": "ValueError", "message": "", "traceback": "",
        "path": "/job/loss.py", "line": 2,
        "user_frames": [[job.path, BREAK, "train"], ["/job/loss.py", 2, "loss"]],
    }  # fmt: skip
    job.waits(0, [job.loop()], reduced=13)
    left = job.over("left", 13, 12, left_at=BREAK)
    job.written.rank(1, [job.loop(), left, failed], reduced=12)
    job.written.exit(1, 1, T0 + 1)
    assert job.codes() == ["DDP901"]


def test_an_exit_within_the_loop_is_told_by_its_call(job: Job) -> None:
    call = {"kind": "exit", "time": T0, "how": "sys.exit", "status": 0, "path": job.path, "line": 4}
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 13, 12), call], reduced=12)
    (finding,) = job.findings()
    assert (finding.code, finding.location and finding.location.line) == ("DDP801", 4)


def test_a_job_that_was_asked_to_stop(job: Job) -> None:
    job.written.supervisor.append({"kind": "signal", "time": T0 - SECOND, "signal": 2})
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    assert "DDP403" not in job.codes()


def test_a_rank_that_was_only_slower_when_another_node_failed(job: Job) -> None:
    """Rank 0 is in the next epoch, and has not been there for long enough to wait."""
    left = [job.loop(), job.over("left", 12, 12, left_at=BREAK)]
    later = job.loop(number=1, before=12)
    job.written.rank(0, [*left, later], phase=Phase.BACKWARD, armed=13, steps=12, reduced=13)
    job.written.exit(0, -15, T0 + SECOND // 10)
    job.written.rank(1, left, phase=Phase.OTHER, armed=12, steps=12, reduced=12)
    job.written.exit(1, -15, T0 + SECOND // 10)
    assert job.codes() == []


@pytest.mark.parametrize("name", BEFORE_FORWARD)
def test_a_rank_that_waits_in_front_of_its_next_forward(job: Job, name: str) -> None:
    """That forward's own backward need not be a reduced one: gradients are accumulated."""
    job.written.rank(
        0, [job.loop()], phase=Phase.WAIT, armed=12, steps=12, reduced=12, collective=name
    )
    job.written.exit(0, -9, T0 + 60 * SECOND)
    job.written.supervisor[-1]["status"] = -15
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    assert job.decided() == ((1,), BREAK)


@pytest.mark.parametrize("name", BEFORE_FORWARD)
def test_a_rank_that_is_missed_in_front_of_a_forward(job: Job, name: str) -> None:
    lost = {
        "kind": "error", "time": T0, "exception": "RuntimeError", "traceback": "",
        "message": "Connection closed by peer", "path": job.path, "line": FORWARD, "step": 12,
        "armed": 12, "phase": "wait", "collective": name,
        "user_frames": [[job.path, FORWARD, "train"]],
    }  # fmt: skip
    job.written.rank(0, [job.loop(), job.over("failed", 13, 12), lost], reduced=12)
    job.written.exit(0, 1, T0)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    assert job.decided() == ((1,), BREAK)


@pytest.mark.parametrize(("line", "codes"), [(8, ["DDP403"]), (7, [])])
def test_an_iterator_that_outlives_the_rank(written: Written, line: int, codes: list[str]) -> None:
    """It was not let go of; the call that the rank died in says where it had got to."""
    job = Job(written, AHEAD, at=2)
    job.written.rank(0, [job.loop()], phase=Phase.OTHER, armed=5, steps=4, reduced=5)
    job.written.exit(0, -15, T0 + SECOND // 10)
    job.written.rank(1, [job.loop()], phase=Phase.WAIT, armed=5, steps=4, reduced=4)
    job.written.exit(1, -6, T0 + 2)
    ring = RingWriter(str(written.path / "rank-0001.r0.collectives"))
    words = ("all_reduce", "0|0-1", "float32", "SUM", f"{job.path}:{line}")
    name, group, dtype, reduce, site = map(ring.text, words)
    ring.begin(T0 + 1, 1, (name, group, dtype, reduce, site), (1,), 1, -1, 0)
    found = job.written.findings(status=1, stderr=ABORTED)
    assert [each.code for each in found if each.code == "DDP403"] == codes
    assert [each.location.line for each in found if each.code == "DDP403" and each.location] == [
        5 for _ in codes
    ]
