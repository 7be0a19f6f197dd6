"""Finished runs in the monitor, and the journals that they are read from."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdoctor.probe.observers.steps import OpenStep
from ddpdoctor.probe.runtime.recorder import Vitals
from ddpdoctor.run import step_series
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.records.base import json_line
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.reported import Reported, to_journal
from ddpdoctor.run.status import Parts, Phase
from ddpdoctor.run.step_series import StepLog
from ddpdoctor.top import run_files
from ddpdoctor.top.frame_sources import FinishedSource, open_source
from ddpdoctor.top.frames import Visible
from ddpdoctor.top.live import LiveSource
from tests.supervise.test_showing import FOUND
from tests.support.generated import MS, USUAL, Generated, step_line
from tests.support.top_runs import ALL, Make, living


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Generated] = []

    def make(ranks: int, **more: Any) -> Generated:
        run = Generated(tmp_path / more.pop("name", "run"), ranks, **more)
        made.append(run)
        return run

    yield make
    for run in made:
        run.close()


# -- runs that are over


def test_a_finished_run_is_a_replay_over_its_steps(make: Make) -> None:
    run = make(3, slow={2: ("data", 30)})
    run.start()
    run.steps(100)
    run.tell(to_journal(Reported(1, FOUND, 0), time.time_ns() + 10**12))
    run.beat(phase=Phase.ENDED)
    run.end(0)
    source = open_source(str(run.path)).replay
    assert isinstance(source, FinishedSource)
    assert (source.length, source.position) == (101, 100)
    end = source.read(ALL)
    assert end.verdict.text.startswith("the job succeeded after")
    assert {row.state for row in end.ranks} == {"ended"} and end.exit_status == 0
    assert all(row.times is not None for row in end.ranks), "its last numbers stay"
    assert end.median is not None and end.skew is not None and end.job.rate
    history = list(source.history())
    assert len(history) > 40 and source.position == 100
    assert [each.job.step for each in history] == sorted(each.job.step or 0 for each in history)
    source.seek(40)
    frame = source.read(Visible(frozenset({2})))
    assert source.position == 40, "reading does not move"
    assert {row.step for row in frame.ranks} == {41} and len(frame.ranks) == 3
    assert frame.verdict.level == "ok" and frame.ranks[0].rank == 2
    assert frame.ranks[0].state == "running" and frame.exit_status is None
    assert frame.findings == () and len(end.findings) == 1
    source.seek(3)
    assert "too early" in source.read(ALL).verdict.text
    moments = []
    for position in (-5, 20, 60, 10**9):
        source.seek(position)
        moments.append(source.read(ALL).time)
    assert moments == sorted(moments) and source.position == 100


def test_a_failed_run_names_the_rank(make: Make) -> None:
    run = make(3)
    run.start()
    run.steps(20)
    run.steps(5, [0, 2])
    run.error(1, "RuntimeError", "boom")
    run.exit(1, 1)
    run.exit(0, -15)
    run.end(1)
    source = FinishedSource(run.path, 1.0)
    end = source.read(ALL)
    assert end.verdict.text == (
        "the job failed with exit status 1 after 60 s; rank 1: RuntimeError: boom (train.py:12)"
    )
    assert end.ranks[0].rank == 1
    source.seek(23)
    states = {row.rank: row.state for row in source.read(ALL).ranks}
    assert states == {0: "running", 1: "dead", 2: "running"}


def test_a_run_whose_supervisor_is_stopped(make: Make) -> None:
    run = make(2)
    source = living(run)
    stopped = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        manifest = json.loads((run.path / "run.json").read_text())
        manifest |= {"supervisor": stopped.pid, "host": socket.gethostname()}
        (run.path / "run.json").write_text(json.dumps(manifest))
        source = LiveSource(run.path, 1.0)
        assert source.read(ALL).notes == ()
        stopped.send_signal(signal.SIGSTOP)
        os.waitpid(stopped.pid, os.WUNTRACED)
        (note,) = source.read(ALL).notes
        assert f"kill -CONT {stopped.pid}" in note
    finally:
        stopped.kill()
        stopped.communicate()


def test_a_run_whose_supervisor_was_killed(make: Make) -> None:
    run = make(2)
    run.start()
    run.steps(20)
    run.end(None)
    snapshot = open_source(str(run.path)).read(ALL)
    assert "how it ended was not recorded" in snapshot.verdict.text
    assert snapshot.exit_status is None


def test_a_finished_run_without_steps(make: Make) -> None:
    run = make(1)
    run.start()
    run.end(0)
    source = FinishedSource(run.path, 1.0)
    assert source.length == 1
    assert source.read(ALL).verdict.text.startswith("the job succeeded")


# -- steps in long journals


def numbers(steps: list[StepRecord]) -> list[int]:
    return [step.step for step in steps]


@given(
    pads=st.lists(st.integers(0, 9000), min_size=1, max_size=40),
    number=st.integers(-1, 45),
    count=st.integers(1, 10),
)
@settings(max_examples=60, deadline=None)
def test_any_step_is_found(
    tmp_path_factory: pytest.TempPathFactory, pads: list[int], number: int, count: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "journal"
    journal = Journal(str(path), 1 << 16)
    for step, pad in enumerate(pads):
        journal.write([step_line(USUAL._replace(number=step), 0)])
        if pad:
            journal.write([json_line({"kind": "note", "pad": "x" * pad})])
    journal.close()
    log = StepLog(path)
    kept = [
        json.loads(line)["step"]
        for name in (f"{path}.1", path)
        if os.path.exists(name)
        for line in Path(name).read_bytes().splitlines()
        if line.startswith(b'{"kind":"step"')
    ]
    assert log.span() == ((kept[0], kept[-1]) if kept else None)
    assert numbers(log.until(number, count)) == [each for each in kept if each <= number][-count:]


def test_the_first_step_is_found_behind_records_that_segments_repeat(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    repeated = json_line({"kind": "note", "pad": "x" * 1000}) * 3000
    for name, first in ((f"{path}.1", 0), (str(path), 90)):
        steps = [step_line(USUAL._replace(number=first + each), 0) for each in range(90)]
        Path(name).write_bytes(repeated + b"".join(steps))
    assert StepLog(path).span() == (0, 179)


def test_the_newest_steps_across_segments(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path), 1 << 16)
    log = StepLog(path)
    assert log.newest(5) == []
    number = 0
    for burst in (1, 3, 200, 1, 0, 700, 40, 2):
        journal.write([step_line(USUAL._replace(number=number + i), 0) for i in range(burst)])
        number += burst
        assert numbers(log.newest(16)) == list(range(max(0, number - 16), number))
    journal.close()


@pytest.mark.parametrize(
    ("samples", "loss", "norm", "backwards"),
    [(0, None, None, 1), (32, 2.5, 1.5, 4), (32, math.nan, math.inf, 4), (0, -1e-05, None, 1)],
)
def test_a_step_reads_as_the_probe_wrote_it(
    samples: int, loss: float | None, norm: float | None, backwards: int
) -> None:
    shown: list[Parts] = []
    start = time.time_ns()
    vitals = cast(Vitals, SimpleNamespace(wrote=shown.append))
    written = OpenStep(7, start, vitals, [backwards])
    written.last, written.times, written.cores = 7, [0, 5, 1, 2, 30, 4, 6, 0], (40, 3)
    written.fetched, written.full, written.loss, written.norm = samples, 1, loss, norm
    step = step_series.parse_step(written.line().rstrip())
    assert step is not None and step_series.parts_of(step) == shown[0]
    assert (step.start, step.total, step.backwards) == (start, 48, backwards)
    assert repr((step.samples, step.loss, step.norm)) == repr((samples or None, loss, norm))


def test_a_damaged_step_is_none() -> None:
    line = step_line(USUAL, time.time_ns()).rstrip()
    assert step_series.parse_step(line) is not None
    for damaged in (
        line[:-1],
        line.replace(b'"step":0', b'"step":-1'),
        line.replace(b'"data":', b'"data":-'),
        line.replace(b"}", b',"pad":"' + b"x" * 1024 + b'"}'),
        line.replace(b"step", b"site", 1),
    ):
        assert step_series.parse_step(damaged) is None, damaged


def test_medians_add_up() -> None:
    made = run_files.mean_times([USUAL._replace(number=n, data=n * MS) for n in range(11)])
    assert made is not None and made.data == pytest.approx(0.005)
    assert made.total == pytest.approx(made.own + made.wait)
    assert run_files.mean_times([]) is run_files.median_times([]) is None
