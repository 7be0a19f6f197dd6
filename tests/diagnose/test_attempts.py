"""Attempts that the launcher repeated: what is said of each, and to which one it belongs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ddpdoctor.core.job import OwnOptions
from ddpdoctor.render import reporter
from ddpdoctor.render.reporter import Reporter
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.supervisor import FindingRecord, RankExitRecord
from ddpdoctor.run.reported import MAX_MISSING, to_journal
from tests.support.generated import Generated


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
    lines = list(reporter.summary_lines(RunReader(run.path).snapshot()))
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
    assert next(reporter.summary_lines(RunReader(run.path).snapshot())) == (
        "1 rank, 3 steps; the job succeeded"
    )
    run.close()


class Told:
    """What a supervisor reports of a run as it examines it, by severity, attempt and step."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "run"
        self.json = directory / "findings.jsonl"
        self.reporter = Reporter(lambda text: None, OwnOptions(json=str(self.json)))

    def look(self, times: int = 1) -> list[tuple[str, str, int, int | None]]:
        told = []
        for _ in range(times):
            self.reporter.examine(RunReader(self.path).snapshot())
            records = [to_journal(each, 1) for each in self.reporter.news]
            told += [
                (each.severity, each.code, each.restart, each.step)
                for each in records
                if isinstance(each, FindingRecord)
            ]
        return told

    def steps(self) -> list[int | None]:
        """The step of each line of JSON that is a finding."""
        lines = map(json.loads, self.json.read_text().splitlines())
        return [line["step"] for line in lines if "retracts" not in line]


def failing(run: Generated, supervisor: Generated) -> None:
    """Rank 1 of an attempt raises, and torchrun ends the other one."""
    run.error(1, "ValueError", "bad batch")
    for rank, status in ((1, 1), (0, -15)):
        supervisor.tell(
            RankExitRecord(
                time=time.time_ns(), rank=rank, restart=run.restart, pid=os.getpid(), status=status
            )
        )


def test_a_failure_belongs_to_its_attempt_though_the_next_one_has_begun(tmp_path: Path) -> None:
    told = Told(tmp_path)
    run = Generated(tmp_path / "run", 2)
    run.start()
    run.steps(7)
    failing(run, run)
    # Before the supervisor looks, torchrun has started the next attempt.
    again = Generated(tmp_path / "run", 2, restart=1)
    again.steps(3)
    assert told.look(MAX_MISSING) == [("warning", "DDP901", 0, 7)]
    assert told.steps() == [7]
    run.end(0)
    assert told.look() == []
    run.close()
    again.close()


def test_a_failure_that_is_restated_stays_with_its_attempt(tmp_path: Path) -> None:
    told = Told(tmp_path)
    run = Generated(tmp_path / "run", 2)
    run.start()
    run.steps(7)
    failing(run, run)
    assert told.look() == [("error", "DDP901", 0, 7)]
    again = Generated(tmp_path / "run", 2, restart=1)
    again.steps(3)
    assert told.look(MAX_MISSING) == [("warning", "DDP901", 0, 7)], "as another attempt followed"
    run.end(0)
    assert told.look() == []
    run.close()
    again.close()


def test_of_attempts_that_fail_alike_the_last_one_is_the_error(tmp_path: Path) -> None:
    told = Told(tmp_path)
    run = Generated(tmp_path / "run", 2)
    run.start()
    run.steps(7)
    failing(run, run)
    told.look()
    again = Generated(tmp_path / "run", 2, restart=1)
    again.steps(3)
    told.look(MAX_MISSING)
    failing(again, run)
    run.end(1)
    assert told.look() == [("error", "DDP901", 1, 3)]
    (last,) = told.reporter.current
    assert last.message == "rank 1 raised ValueError: bad batch"
    run.close()
    again.close()
