"""Where the monitor's frames come from: live and finished runs, recordings, the machine."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import to_record
from ddpdoctor.run import rundir
from ddpdoctor.run.record import Journal, Phase
from ddpdoctor.top import demo, live, outputs, steplog, times
from ddpdoctor.top.ages import Ages
from ddpdoctor.top.choosing import live_runs, open_source
from ddpdoctor.top.finished import FinishedSource
from ddpdoctor.top.live import LiveSource
from ddpdoctor.top.recording import Recorded, Recording, RecordingSource
from ddpdoctor.top.snapshot import RankRow, Snapshot
from ddpdoctor.top.source import Replay, Want
from ddpdoctor.top.steplog import StepLog, StepTail
from ddpdoctor.top.verdict import Facts, judge
from tests.conftest import LIMIT, Doctor
from tests.generated import MS, USUAL, Generated, step_line, uuid
from tests.test_showing import FOUND

Make = Callable[..., Generated]
ALL = Want()


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


def living(run: Generated, steps: int = 30) -> LiveSource:
    run.start()
    if steps:
        run.steps(steps)
    return LiveSource(run.path, 1.0)


# -- live runs


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 1024])
def test_runs_of_any_size(make: Make, ranks: int) -> None:
    slow = {ranks - 1: ("data", 30)} if ranks > 1 else {}
    source = living(make(ranks, slow=slow, gpus=True))
    snapshot = source.read(Want(frozenset({0}), 20))
    assert len(snapshot.ranks) == snapshot.world_size == ranks
    assert {row.state for row in snapshot.ranks} == {"running"}
    first = snapshot.ranks[0]
    if ranks > 1:
        assert first.rank == snapshot.verdict.rank == ranks - 1
        assert f"rank {ranks - 1} holds the others up by 30.0 ms a step" in snapshot.verdict.text
        assert "data loading" in snapshot.verdict.text
        assert snapshot.skew == pytest.approx(65 / 50 if ranks == 2 else 65 / 35)
    assert first.times is not None and first.times.own == pytest.approx(
        0.065 if ranks > 1 else 0.035
    )
    row = next(row for row in snapshot.ranks if row.rank == 0)
    assert (row.node, row.local_rank, row.step, row.epoch) == ("node-0", 0, 30, 0)
    assert len(row.owns) == len(row.totals) == 20
    if ranks > 1:
        assert first.owns == (), "nobody looks at it"
    assert (row.rss, row.allocated, row.reserved, row.peak) == (1 << 30, 1 << 28, 1 << 29, 3 << 27)
    assert snapshot.notes == ()
    assert outputs.read(outputs.line(snapshot)) == snapshot


def test_the_victim_is_not_blamed(make: Make) -> None:
    # Rank 1 computes longer; rank 0's step is as long, spent waiting.
    source = living(make(2, slow={1: ("backward", 40)}))
    snapshot = source.read(ALL)
    assert [row.rank for row in snapshot.ranks] == [1, 0]
    one, zero = snapshot.ranks
    assert one.times is not None and zero.times is not None
    assert zero.times.total == pytest.approx(one.times.total)
    assert zero.times.wait - one.times.wait == pytest.approx(0.040)
    assert "rank 1" in snapshot.verdict.text and "backward compute" in snapshot.verdict.text


def test_a_rank_that_turns_slow_is_seen_on_its_page_alone(make: Make) -> None:
    run = make(4)
    source = living(run)
    assert source.read(Want(frozenset())).verdict.level == "ok"
    for rank, each in run.every.items():
        phase = "forward" if rank == 2 else "wait"
        each.parts = each.parts._replace(**{phase: getattr(each.parts, phase) + 30 * MS})
    for _ in range(times.WINDOW // 2 + 1):
        run.steps(1)
        snapshot = source.read(Want(frozenset()))
    assert snapshot.verdict.rank == 2 and "forward pass" in snapshot.verdict.text


def test_nothing_is_said_of_the_first_steps(make: Make) -> None:
    run = make(2, slow={1: ("data", 500)})
    source = living(run, steps=9)
    assert source.read(ALL).verdict.rank is None
    run.steps(30)
    assert source.read(ALL).verdict.rank == 1


@pytest.mark.parametrize("ranks", [3, 8])
def test_ranks_that_are_as_slow_share_the_blame(make: Make, ranks: int) -> None:
    run = make(ranks, slow={1: ("forward", 30), 2: ("forward", 31)})
    verdict = living(run).read(ALL).verdict
    assert verdict.text.startswith("ranks 1 and 2 hold the others up by 31.0 ms a step (")
    assert verdict.text.endswith("in their forward pass")
    # The same one first in each frame, whichever of them was slower by a hair.
    assert verdict.rank == 1


def test_ranks_that_are_as_slow_in_different_things(make: Make) -> None:
    run = make(8, slow={1: ("forward", 30), 2: ("data", 30)})
    text = living(run).read(ALL).verdict.text
    assert text == "ranks 1 and 2 hold the others up by 30.0 ms a step (43%)"


def test_a_rank_that_is_less_slow_is_not_named_beside_the_slowest(make: Make) -> None:
    run = make(8, slow={1: ("forward", 10), 2: ("forward", 40)})
    assert living(run).read(ALL).verdict.text.startswith("rank 2 holds the others up by 40.0 ms")


@pytest.mark.parametrize(("cpu", "lacked", "blamed"), [(35, 40, None), (70, 5, 1)])
def test_a_rank_that_gets_no_core_is_not_blamed(
    make: Make, cpu: int, lacked: int, blamed: int | None
) -> None:
    """Unless it is its work that takes long. By its status page, and by its journal."""
    run = make(2, slow={1: ("forward", 40)})
    run.every[1].parts = run.every[1].parts._replace(cpu=cpu * MS, waited=41 * MS)
    run.every[0].parts = run.every[0].parts._replace(cpu=33 * MS)
    source = living(run)
    for _ in range(times.WINDOW):
        # What the journal said is older now than what the medians are made of.
        run.steps(1)
        snapshot = source.read(Want(frozenset()))
    for seen in (snapshot, LiveSource(run.path, 1.0).read(ALL)):
        row = next(row for row in seen.ranks if row.rank == 1)
        assert seen.verdict.rank == blamed
        assert row.times is not None and row.times.lacked == pytest.approx(lacked / 1000)
        assert outputs.read(outputs.line(seen)) == seen


def test_an_unsplit_backward_blames_nobody_for_it(make: Make) -> None:
    run = make(2, slow={1: ("backward", 40)})
    run.start()
    run.steps(40, split=False)
    source = LiveSource(run.path, 1.0)
    snapshot = source.read(ALL)
    assert snapshot.verdict.rank is None
    assert snapshot.ranks[0].times is not None and not snapshot.ranks[0].times.split


def test_an_unsplit_backward_does_not_hide_a_slow_loader(make: Make) -> None:
    run = make(2)
    run.every[1].parts = USUAL._replace(data=42 * MS)
    # The other waits within its backward, and nobody knows how long.
    run.every[0].parts = USUAL._replace(backward=60 * MS)
    run.start()
    run.steps(40, split=False)
    assert LiveSource(run.path, 1.0).read(ALL).verdict.rank == 1


def test_split_steps_count_where_they_are_rare(make: Make) -> None:
    run = make(2, slow={1: ("backward", 40)})
    run.start()
    for _ in range(8):
        run.steps(1)
        run.steps(3, split=False)
    snapshot = LiveSource(run.path, 1.0).read(ALL)
    assert snapshot.verdict.rank == 1
    assert len(snapshot.ranks[0].owns) == 8 and len(snapshot.ranks[0].totals) == 32


def test_all_wait_for_data(make: Make) -> None:
    run = make(2)
    for each in run.every.values():
        each.parts = USUAL._replace(data=30 * MS)
    snapshot = living(run).read(ALL)
    assert "both ranks wait for data: up to 44% of a step" in snapshot.verdict.text
    assert snapshot.verdict.rank is None


def test_a_healthy_job_is_left_alone_and_its_rows_stay(make: Make) -> None:
    run = make(8)
    for rank, each in run.every.items():
        each.parts = USUAL._replace(backward=20 * MS + (rank % 3) * MS // 3)
    snapshot = living(run).read(ALL)
    assert snapshot.verdict.level == "ok"
    assert "no rank holds the others up" in snapshot.verdict.text
    assert [row.rank for row in snapshot.ranks] == list(range(8))


def test_starting(make: Make, tmp_path: Path) -> None:
    run = make(0)
    run.start()
    source = LiveSource(run.path, 1.0)
    assert "no rank has joined" in source.read(ALL).verdict.text
    other = make(2, name="other")
    other.start()
    other.beat(phase=Phase.STARTING)
    snapshot = LiveSource(other.path, 1.0).read(ALL)
    assert "starting: 2 ranks have joined" in snapshot.verdict.text
    assert {row.state for row in snapshot.ranks} == {"starting"}
    assert snapshot.ranks[0].times is None


def test_a_dead_rank_says_how_it_died(make: Make) -> None:
    run = make(4)
    source = living(run)
    run.error(2, "ValueError", "bad batch\nmore")
    run.exit(2, 1)
    run.exit(1, -9, oom="cgroup")
    snapshot = source.read(ALL)
    dead = {row.rank: row.said for row in snapshot.ranks if row.state == "dead"}
    assert dead == {2: "ValueError: bad batch (train.py:12)", 1: "killed by SIGKILL, out of memory"}
    assert snapshot.verdict.text == "rank 2 died (and 1 more): ValueError: bad batch (train.py:12)"
    assert (snapshot.verdict.level, snapshot.ranks[0].rank) == ("error", 2)
    assert snapshot.ranks[-1].state == "dead"
    # Its memory is nobody's any more.
    assert snapshot.ranks[0].rss is snapshot.ranks[0].heartbeat is None


def test_an_exception_ends_the_interpreter_in_order_and_is_a_death(make: Make) -> None:
    run = make(3)
    source = living(run)
    run.error(2, "ValueError", "bad batch")
    run.beat([2], phase=Phase.ENDED)
    # Before its process was reaped, too.
    assert source.read(ALL).verdict.text == "rank 2 died: ValueError: bad batch (train.py:12)"
    run.error(0, "RuntimeError", "Connection closed by peer")
    run.beat([0], phase=Phase.ENDED)
    # Reaped before the one that it died of.
    run.exit(0, 1)
    run.exit(2, 1)
    run.beat([1], phase=Phase.ENDED)
    run.exit(1, 3)
    snapshot = source.read(ALL)
    assert {row.rank: row.said for row in snapshot.ranks if row.state == "dead"} == {
        0: "RuntimeError: Connection closed by peer (train.py:12)",
        1: "exit status 3",
        2: "ValueError: bad batch (train.py:12)",
    }
    assert snapshot.verdict.rank == 2


def test_ranks_that_ended_well(make: Make) -> None:
    run = make(2)
    source = living(run)
    run.beat([0], phase=Phase.ENDED)
    run.exit(0, -6)
    states = {row.rank: (row.state, row.said) for row in source.read(ALL).ranks}
    assert states == {0: ("ended", "killed by SIGABRT"), 1: ("running", "")}


def test_a_stale_rank_says_since_when(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveSource, "_lacks_core", lambda *_: False)
    run = make(2)
    source = living(run)
    run.beat([1], ago=30, beat_ago=20)
    row = next(row for row in source.read(ALL).ranks if row.rank == 1)
    assert row.state == "stale" and row.heartbeat == pytest.approx(20, abs=2)
    assert "no sign of life from rank 1 for 20 s" in source.read(ALL).verdict.text
    # Its heart cannot beat without a core.
    monkeypatch.setattr(LiveSource, "_lacks_core", lambda *_: True)
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_RUNNING)
    row = next(row for row in source.read(ALL).ranks if row.rank == 1)
    assert (row.state, row.said) == ("running", "gets little CPU")
    assert "no sign of life" not in source.read(ALL).verdict.text


def test_ranks_that_are_stopped_together(make: Make) -> None:
    rows = living(make(3)).read(ALL).ranks
    stopped = "its process is stopped (SIGSTOP)"
    stale = [replace(row, state="stale", heartbeat=9.0, said=stopped) for row in rows[:2]]

    def said(*rows: RankRow) -> str:
        return judge(rows, Facts(live=True)).text

    assert said(stale[0], rows[1]).endswith("no sign of life from rank 0 for 9.0 s: " + stopped)
    assert said(*stale, rows[2]) == (
        "no sign of life from ranks 0 and 1 for 9.0 s: their processes are stopped (SIGSTOP)"
    )
    other = replace(stale[1], said="its process is traced")
    assert said(stale[0], other) == "no sign of life from ranks 0 and 1 for 9.0 s"


def test_a_rank_whose_process_is_gone_is_dead(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(2)
    source = living(run)
    run.beat([1], ago=30, beat_ago=20)

    def gone(pid: int) -> psutil.Process:
        raise psutil.NoSuchProcess(pid)

    monkeypatch.setattr(psutil, "Process", gone)
    snapshot = source.read(ALL)
    assert snapshot.ranks[0].state == "dead"
    assert snapshot.verdict.text == "rank 1 died: its process is gone"


def test_a_rank_that_writes_no_heartbeat_is_not_stale(make: Make) -> None:
    # As of a version that had none: its forward may take as long as it likes.
    run = make(2)
    source = living(run)
    run.beat([0], ago=100)
    run.every[0].page.set_beat(0)
    assert all(row.state == "running" for row in source.read(ALL).ranks)


def test_a_rank_in_the_debugger_says_so(make: Make) -> None:
    run = make(2)
    source = living(run)
    debug = {"kind": "debug", "time": 1, "rank": 1, "port": 5679}
    run.tell({**debug, "state": "ready"})
    assert [row.state for row in source.read(ALL).ranks] == ["running", "running"]
    run.tell({**debug, "state": "attached"})
    run.tell({**debug, "state": "stopped", "place": "/job/train.py:40"})
    run.beat([0], phase=Phase.BACKWARD, ago=90)
    snapshot = source.read(ALL)
    assert snapshot.ranks[0].state == "debugger" and snapshot.ranks[0].debug_port == 5679
    assert snapshot.verdict.text == (
        "rank 1 stands in the debugger at train.py:40: the others wait for it"
    )
    run.tell({**debug, "state": "detached"})
    assert {row.state for row in source.read(ALL).ranks} == {"running"}


def test_all_ranks_wait(make: Make) -> None:
    run = make(4)
    source = living(run)
    run.beat(phase=Phase.WAIT, ago=42, collective="all_reduce")
    verdict = source.read(ALL).verdict
    assert verdict.text == "all 4 ranks wait in all_reduce for 42 s"
    run.beat([3], phase=Phase.WAIT, ago=42, collective="barrier")
    text = LiveSource(run.path, 1.0).read(ALL).verdict.text
    assert "not in the same call: all_reduce (ranks 0, 1 and 2), barrier (rank 3)" in text


def test_who_does_not_come_is_named(make: Make) -> None:
    run = make(4)
    source = living(run)
    run.beat([0, 1, 2], phase=Phase.BACKWARD, ago=70)
    run.beat([3], phase=Phase.DATA, ago=71)
    verdict = source.read(ALL).verdict
    assert verdict.text == (
        "3 ranks wait in the backward's all-reduce for 70 s, "
        "for rank 3, which is in data (train.py:32)"
    )
    assert (verdict.rank, verdict.level) == (3, "warning")
    run.beat([3], phase=Phase.ENDED)
    verdict = source.read(ALL).verdict
    assert "rank 3 has already ended" in verdict.text and verdict.level == "error"


def test_a_rank_that_has_not_begun_is_waited_for(make: Make) -> None:
    run = make(3)
    source = living(run, steps=0)
    run.beat([0, 1], phase=Phase.WAIT, ago=40, collective="barrier")
    run.beat([2], phase=Phase.STARTING, ago=50)
    assert source.read(ALL).verdict.text == (
        "2 ranks wait in barrier for 40 s, for rank 2, which has not begun"
    )


def test_a_job_that_is_asked_to_stop_blames_nobody(make: Make) -> None:
    run = make(2)
    source = living(run)
    run.tell({"kind": "signal", "time": 1, "signal": 2})
    run.exit(1, -2)
    verdict = source.read(ALL).verdict
    assert (verdict.text, verdict.rank) == ("the job was asked to stop, and is ending", None)


def test_ranks_that_wait_for_a_debugger_before_they_begin(make: Make) -> None:
    run = make(0)
    run.start()
    for rank in (0, 1):
        run.tell({"kind": "debug", "time": 1, "rank": rank, "state": "waits", "port": 5678 + rank})
    text = LiveSource(run.path, 1.0).read(ALL).verdict.text
    assert text == "starting: ranks 0 and 1 wait for a debugger (`ddpdoctor attach`)"


def test_a_job_of_slow_steps_is_not_stuck(make: Make) -> None:
    run = make(2)
    for each in run.every.values():
        each.parts = USUAL._replace(backward=9_000 * MS)
    source = living(run)
    run.beat(phase=Phase.BACKWARD, ago=8)
    assert source.read(ALL).verdict.level == "ok"


def test_a_validation_is_no_hang(make: Make) -> None:
    run = make(2)
    source = living(run)
    run.beat(phase=Phase.OTHER, ago=45)
    verdict = source.read(ALL).verdict
    assert (verdict.level, verdict.rank) == ("info", None)
    assert "no step for 45 s" in verdict.text


def test_the_newest_attempt_counts(make: Make, tmp_path: Path) -> None:
    run = make(4)
    source = living(run)
    run.exit(0, 1)
    assert source.read(ALL).verdict.level == "error"
    again = make(2, restart=1)
    again.steps(30)
    source._listed = float("-inf")
    snapshot = source.read(ALL)
    assert [row.restart for row in snapshot.ranks] == [1, 1]
    assert snapshot.verdict.level == "ok"


def test_gpus_are_joined_by_uuid_and_mig_has_none(make: Make) -> None:
    run = make(16, gpus=True)
    run.poll(mig=[3])
    snapshot = living(run).read(ALL)
    assert len(snapshot.gpus) == 16 and snapshot.nvml == ""
    for row in snapshot.ranks:
        assert row.gpu is not None
        assert (row.gpu.uuid, row.gpu.power) == (f"GPU-{uuid(row.rank)}", 500.0 + row.rank)
        assert row.gpu.node == row.node
        assert (row.gpu.utilization, row.gpu.mig) == (
            (None, True) if row.rank == 3 else (0.97, False)
        )


def test_numbers_of_a_poller_that_fell_silent_are_left_out(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(2, gpus=True)
    run.poll()
    source = living(run)
    assert source.read(ALL).gpus[0].power == 500.0
    base = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: base() + 30)
    snapshot = source.read(ALL)
    assert snapshot.gpus[0].power is None and "not read for 3" in snapshot.gpus[0].problem
    assert "not read" in snapshot.nvml
    run.poll(nvml="the NVIDIA driver was updated")
    snapshot = source.read(ALL)
    assert snapshot.gpus[0].power == 500.0 and "updated" in snapshot.nvml


def test_no_gpu(make: Make) -> None:
    snapshot = living(make(2)).read(ALL)
    assert snapshot.gpus == () and snapshot.ranks[0].gpu is None
    assert snapshot.ranks[0].allocated is None


def test_output_belongs_to_the_rank_that_its_mark_says(make: Make) -> None:
    run = make(16)
    source = living(run)
    text = "plain\n[rank1]: a \x1b[31mred\x1b[0m one\n[default2]:by local rank\n"
    text += " 5%\r 9%\r10%\n[rank9]: x"
    (run.path / rundir.STDERR_SO_FAR).write_text(text)
    snapshot = source.read(Want(frozenset({1, 2, 9, 10})))
    output = {row.rank: row.output for row in snapshot.ranks if row.output}
    # Rank 10 has local rank 2, too, but on another node.
    assert output == {1: ("a red one",), 2: ("by local rank",), 9: ("x",)}
    assert snapshot.output[:2] == ("plain", "[rank1]: a red one") and "10%" in snapshot.output
    (run.path / rundir.STDERR).write_text("the end\n")
    assert source.read(ALL).output == ("the end",)


def test_findings_come_with_their_time(make: Make) -> None:
    run = make(2)
    source = living(run)
    run.tell({"kind": "finding", "time": 5_000_000_000, **to_record(FOUND)})
    run.tell({"kind": "finding", "nonsense": 1})
    snapshot = source.read(ALL)
    (row,) = snapshot.findings
    assert (row.finding.code, row.time) == ("DDP610", 5.0)
    assert "found so far: 1 warning" in snapshot.verdict.text


def test_ten_thousand_findings(make: Make) -> None:
    run = make(1)
    source = living(run)
    for number in range(10_000):
        run.tell({"kind": "finding", "time": number + 1, **to_record(FOUND)})
    snapshot = source.read(ALL)
    assert len(snapshot.findings) == 500
    assert snapshot.findings[-1].time == 10_000 / 1e9
    assert snapshot.notes == ("9500 older findings are left out",)


# -- what goes wrong


def test_the_directory_vanishes(make: Make) -> None:
    run = make(3)
    source = living(run)
    source.read(ALL)
    shutil.rmtree(run.path)
    for _ in range(3):
        snapshot = source.read(ALL)
    assert "gone" in snapshot.verdict.text and not snapshot.live
    assert [row.state for row in snapshot.ranks] == ["stale"] * 3
    assert any("is gone" in note for note in snapshot.notes)


@pytest.mark.parametrize("content", [b"", b"garbage" * 300, bytes(1024)])
def test_a_page_turns_to_garbage(make: Make, content: bytes) -> None:
    run = make(3)
    source = living(run)
    source.read(ALL)
    (run.path / "rank-0001.r0.status").write_bytes(content)
    snapshot = source.read(ALL)
    assert len(snapshot.ranks) == 3, "what it said last"
    assert "the status page of rank 1 cannot be read" in snapshot.notes[0]
    fresh = LiveSource(run.path, 1.0).read(ALL)
    assert [row.rank for row in fresh.ranks] == [0, 2]


@pytest.mark.parametrize(
    "name", ["rank-0000.r0.jsonl", "supervisor.jsonl", "stderr-so-far.log", "gpus-node-0.json"]
)
def test_files_of_garbage(make: Make, name: str) -> None:
    run = make(2, gpus=True)
    run.poll()
    source = living(run)
    source.read(ALL)
    noise = random.Random(0).randbytes(5000) + b'\n{"kind":"step","step":"x"}\n[1]\n"\n'
    for content in (noise, b"", b'{"kind":"step","step":1,"data":"x"}\n' * 50, b"\0" * 100_000):
        (run.path / name).write_bytes(content)
        assert len(source.read(ALL).ranks) == 2
        assert len(LiveSource(run.path, 1.0).read(ALL).ranks) == 2


@given(noise=st.binary(min_size=1008, max_size=1008))
@settings(max_examples=60, deadline=None)
def test_pages_of_noise_behind_a_good_head(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes
) -> None:
    run = Generated(tmp_path_factory.mktemp("noise"), 2)
    run.start()
    page = run.path / "rank-0001.r0.status"
    page.write_bytes(page.read_bytes()[:16] + noise)
    source = LiveSource(run.path, 1.0)
    for _ in range(2):
        snapshot = source.read(ALL)
        assert len(snapshot.ranks) == 2
        outputs.read(outputs.line(snapshot))
    run.close()
    source.close()


def test_ranks_out_of_sight_are_read_every_other_time(make: Make) -> None:
    run = make(100)
    source = living(run)
    source.read(Want(frozenset({7})))
    run.steps(1)
    for frames, fresh in ((1, 50), (2, 100)):
        rows = source.read(Want(frozenset({7}))).ranks
        assert sum(row.step == 31 for row in rows) in (fresh, fresh + 1), frames
        assert next(row.step for row in rows if row.rank == 7) == 31
    run.exit(8, -9)
    run.exit(9, -9)
    rows = source.read(Want(frozenset({7}))).ranks
    assert {row.rank for row in rows if row.state == "dead"} == {8, 9}


def test_a_manifest_that_is_half_written(make: Make) -> None:
    run = make(1)
    whole = (run.path / "run.json").read_bytes()
    (run.path / "run.json").write_bytes(whole[:40])
    source = living(run)
    snapshot = source.read(ALL)
    assert (snapshot.run, snapshot.started) == ("run", None)
    assert "run.json cannot be read" in snapshot.notes
    (run.path / "run.json").write_bytes(whole)
    assert source.read(ALL).run == "generated"
    run.close()
    (run.path / "run.json").write_bytes(whole[:40])
    with pytest.raises(DoctorError, match="damaged"):
        open_source(str(run.path))


def test_clocks_jump() -> None:
    ages = Ages()
    hour = 3600 * 10**9
    assert ages.age("a", 0, 5 * 10**9, 100.0) == pytest.approx(5)
    # This clock goes back an hour, then ahead: the stamp did not change, so it only got older.
    assert ages.age("a", 0, -hour, 101.0) == pytest.approx(6)
    assert ages.age("a", 0, hour, 102.0) == pytest.approx(7)
    # It changed since the last look, two seconds ago at most, whatever its clock says.
    assert ages.age("a", -hour, 0, 104.0) == pytest.approx(2)
    assert ages.age("a", hour, 0, 105.0) == pytest.approx(0)


def test_text_of_a_rank_cannot_steer_the_terminal(make: Make) -> None:
    run = make(1)
    source = living(run)
    run.error(0, "ValueError", "\x1b]0;evil\x07 \x1b[2Jbad")
    run.exit(0, 1)
    (row,) = source.read(ALL).ranks
    assert "\x1b" not in row.said and "\x07" not in row.said


# -- runs that are over


def test_a_finished_run_is_a_replay_over_its_steps(make: Make) -> None:
    run = make(3, slow={2: ("data", 30)})
    run.start()
    run.steps(100)
    run.tell({"kind": "finding", "time": time.time_ns() + 10**12, **to_record(FOUND)})
    run.beat(phase=Phase.ENDED)
    run.end(0)
    source = open_source(str(run.path))
    assert isinstance(source, Replay) and isinstance(source, FinishedSource)
    assert (source.length, source.position) == (101, 100)
    end = source.read(ALL)
    assert end.verdict.text.startswith("the job succeeded after")
    assert {row.state for row in end.ranks} == {"ended"} and end.exit_status == 0
    source.seek(40)
    frame = source.read(Want(frozenset({2}), 10))
    assert source.position == 40, "reading does not move"
    assert {row.step for row in frame.ranks} == {41} and len(frame.ranks) == 3
    assert frame.verdict.rank == 2 and frame.ranks[0].rank == 2
    assert len(frame.ranks[0].owns) == 10 and frame.ranks[1].owns == ()
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
        "the job failed with exit status 1; rank 1: RuntimeError: boom (train.py:12)"
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


def numbers(steps: list[steplog.StepLine]) -> list[int]:
    return [step.parts.number for step in steps]


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
            journal.write([{"kind": "note", "pad": "x" * pad}])
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


def test_a_tail_follows_a_journal_across_its_segments(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path), 1 << 16)
    tail = StepTail(path, 50)
    tail.poll()
    number = 0
    for burst in (1, 3, 200, 1, 0, 700, 40, 2):
        journal.write([step_line(USUAL._replace(number=number + i), 0) for i in range(burst)])
        number += burst
        tail.poll()
        found = [step.parts.number for step in tail.steps]
        # Just after a segment begins its older steps are in the other file.
        assert found == list(range(found[0], number))
    journal.close()
    assert len(tail.steps) == 50


def test_a_torn_line_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    path, line = tmp_path / "journal", step_line(USUAL._replace(number=7), 0)
    tail = StepTail(path, 5)
    path.write_bytes(line[:30])
    tail.poll()
    assert not tail.steps
    path.write_bytes(line)
    tail.poll()
    assert [step.parts.number for step in tail.steps] == [7]


def test_medians_add_up() -> None:
    made = times.of_steps([USUAL._replace(number=n, data=n * MS) for n in range(11)])
    assert made is not None and made.data == pytest.approx(0.005)
    assert made.total == pytest.approx(made.own + made.wait)
    assert times.of_steps([]) is times.of_ranks([]) is None


# -- recordings and other outputs


def test_what_is_not_known_is_absent(make: Make) -> None:
    told = json.loads(outputs.line(living(make(1)).read(ALL)))

    def values(of: Any) -> Iterator[Any]:
        if isinstance(of, dict):
            for key, each in of.items():
                assert each is not None and each != "", key
                yield from values(each)
        elif isinstance(of, list):
            for each in of:
                yield from values(each)

    list(values(told))
    (row,) = told["ranks"]
    assert row["times"]["own"] == pytest.approx(0.035)
    assert "gpu" not in row and "allocated" not in row and "exit_status" not in told
    assert isinstance(told["time"], float) and told["live"] is True


def test_a_recording_is_played_again(tmp_path: Path) -> None:
    now = [1000.0]
    path = tmp_path / "recording"
    source = Recorded(demo.DemoSource(0.5, clock=lambda: now[0]), Recording(str(path)))
    frames = []
    for _ in range(5):
        frames.append(source.read(Want(frozenset({1}))))
        now[0] += 0.5
    source.read(Want())
    source.close()
    with path.open("ab") as file:
        file.write(b'{"format":1,"torn')
    played = open_source(None, demo=False, replay=str(path))
    assert isinstance(played, Replay) and isinstance(played, RecordingSource)
    assert (played.length, played.position, played.interval) == (6, 0, 0.5)
    for position, frame in enumerate(frames):
        played.seek(position)
        assert played.read(ALL) == frame
    assert len(frames[0].ranks[0].owns) == 60, "all ranks are kept, looked at or not"
    played.close()


def test_a_damaged_frame_is_one_frame(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    line = outputs.line(demo.at(700, 1000, ALL))
    path.write_text(f"{line}\nnonsense\n{line}\n")
    source = RecordingSource(str(path))
    source.seek(1)
    assert "frame 2" in source.read(ALL).verdict.text
    source.seek(2)
    assert len(source.read(ALL).ranks) == 8
    source.close()


@pytest.mark.parametrize(
    "content", [b"", b"nonsense\n", b'{"format":99}\n', b"[]\n", b'{"kind":1}']
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "recording"
    path.write_bytes(content)
    with pytest.raises(DoctorError, match="no recording"):
        RecordingSource(str(path))
    with pytest.raises(DoctorError, match="there already"):
        Recording(str(path))
    with pytest.raises(DoctorError, match="cannot read"):
        RecordingSource(str(tmp_path / "none"))


def test_one_line_per_interval_until_the_run_is_over(make: Make) -> None:
    run = make(2)
    source = living(run)
    out, slept = io.StringIO(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            run.end(0)

    outputs.watch(source, out, sleep=sleep)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["live"] for line in lines] == [True, True, True, False]
    assert min(slept) >= 0
    out = io.StringIO()
    outputs.watch(FinishedSource(run.path, 1.0), out, sleep=sleep)
    assert len(out.getvalue().splitlines()) == 31
    out = io.StringIO()
    outputs.once(source, out)
    assert json.loads(out.getvalue())["exit_status"] == 0


# -- choosing


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's runs, somewhere else."""
    path = tmp_path / "base"
    path.mkdir(mode=0o700)
    monkeypatch.setattr(rundir, "base_directory", lambda: path)
    return path


def test_the_machine_until_a_run_starts_and_then_the_next(base: Path) -> None:
    source = open_source(None)
    snapshot = source.read(ALL)
    assert snapshot.kind == "machine" and snapshot.machine is not None
    assert snapshot.machine.memory_total
    assert live_runs() == []
    one = Generated(base / "20260101-000000-aaaaaa", 2)
    one.start()
    one.steps(20)
    assert source.read(ALL).kind == "run"
    (choice,) = live_runs()
    assert (choice.id, choice.ranks, choice.command) == ("generated", 2, "train.py")
    one.end(0)
    over = source.read(ALL)
    assert not over.live and over.exit_status == 0, "its end stays"
    two = Generated(base / "20260102-000000-bbbbbb", 3)
    two.start()
    assert len(source.read(ALL).ranks) == 3
    for run in (one, two):
        run.close()
    source.close()


def test_no_such_run(base: Path) -> None:
    with pytest.raises(DoctorError, match="no run named nonsense"):
        open_source("nonsense")


def test_the_demonstration_is_the_same_each_time() -> None:
    assert demo.at(700, 1000, ALL) == demo.at(700, 1000, ALL)
    snapshot = open_source(None, demo=True).read(ALL)
    assert (snapshot.kind, len(snapshot.ranks), len(snapshot.gpus)) == ("demo", 8, 8)
    assert {row.node for row in snapshot.ranks} == {"node-a", "node-b"}
    assert snapshot.verdict.rank == snapshot.ranks[0].rank == 5
    assert "data loading" in snapshot.verdict.text
    for row in snapshot.ranks:
        assert row.times is not None and row.times.total == pytest.approx(0.221, abs=0.01)
    assert demo.at(700, 1000, ALL, seed=1).verdict.rank == 6
    assert len(demo.at(700, 1000, Want(frozenset()), ranks=256).ranks) == 256


def test_verdicts_are_short(make: Make) -> None:
    run = make(1024)
    source = living(run)
    run.error(1000, "ValueError", "x" * 500)
    run.exit(1000, 1)
    assert len(source.read(Want(frozenset())).verdict.text) <= 100
    run.beat(range(0, 1000, 2), beat_ago=99, ago=99)
    assert len(source.read(Want(frozenset())).verdict.text) <= 100


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\n"
        "from ddpdoctor.top.choosing import open_source\n"
        "from ddpdoctor.top.source import Want\n"
        "open_source(None, demo=True).read(Want())\n"
        "import ddpdoctor.top.live, ddpdoctor.top.finished, ddpdoctor.top.recording\n"
        "import ddpdoctor.top.following, ddpdoctor.top.outputs\n"
        "bad = {'torch', 'textual', 'numpy', 'rich', 'ddpdoctor.rules', 'prometheus_client'}\n"
        "print(sorted(bad & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# -- a real job

JOB = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sys.stderr.write(f"[rank{rank}]: hello\\n")
while True:
    loss = model(torch.randn(8, 64)).sum()
    if rank == 1:
        time.sleep(0.03)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_slowed_rank_of_a_real_job_is_blamed(doctor: Doctor) -> None:
    job = doctor.start("--nproc-per-node", "2", str(doctor.write("train.py", JOB)))
    job.wait_for_steps(60)
    source = open_source(str(job.run_dir))
    assert isinstance(source, LiveSource)
    deadline = time.monotonic() + LIMIT
    snapshot: Snapshot = source.read(ALL)
    while (snapshot.verdict.rank is None or not snapshot.output) and time.monotonic() < deadline:
        time.sleep(1)
        snapshot = source.read(ALL)
    job.process.terminate()
    job.finish()
    assert snapshot.verdict.rank == snapshot.ranks[0].rank == 1, snapshot
    assert "code between the phases" in snapshot.verdict.text
    assert snapshot.skew is not None and snapshot.skew > 1.5
    victim = snapshot.ranks[1]
    assert victim.times is not None and victim.times.wait > 0.02
    assert victim.rss is not None and victim.rss > 50 << 20
    assert victim.heartbeat is not None and victim.heartbeat < live.STALE
    assert victim.output == ("hello",) and victim.state == "running"
    end = source.read(ALL)
    assert not end.live and "asked to stop" in end.verdict.text
