"""The summary tells of every attempt that the launcher repeated."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.render import summary
from ddpdoctor.run.reader import RunReader
from tests.generated import Generated


def test_each_attempt_has_its_line(tmp_path: Path) -> None:
    run = Generated(tmp_path / "run", 2)
    run.start()
    run.steps(7)
    run.error(1, "ValueError", "bad batch")
    run.exit(1, 1)
    run.exit(0, -15)
    again = Generated(tmp_path / "run", 2, restart=1)
    again.steps(30)
    run.end(0)
    lines = list(summary.lines(RunReader(run.path).snapshot()))
    assert lines[:2] == [
        "attempt 1: 2 ranks, 7 steps; rank 1: ValueError: bad batch",
        "attempt 2: 2 ranks, 30 steps; the job succeeded",
    ]
    run.close()
    again.close()


def test_of_one_attempt_no_number_is_said(tmp_path: Path) -> None:
    run = Generated(tmp_path / "run", 1)
    run.start()
    run.steps(3)
    run.end(0)
    assert next(summary.lines(RunReader(run.path).snapshot())) == (
        "1 rank, 3 steps; the job succeeded"
    )
    run.close()
