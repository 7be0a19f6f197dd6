"""What the monitor says of ranks that died, stopped, wait or have not begun."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpdoctor.run.records.base import encode
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.supervisor import DebugRecord, SignalRecord
from ddpdoctor.run.records.training import SaveRecord
from ddpdoctor.run.status import Phase
from ddpdoctor.top import run_files
from ddpdoctor.top.headline import VerdictFacts, judge
from ddpdoctor.top.live import LiveSource, ProcessStates
from ddpdoctor.top.snapshot import RankRow
from tests.support.generated import MS, USUAL, Generated
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
    monkeypatch.setattr(ProcessStates, "lacks_core", lambda *_: False)
    run = make(2)
    source = living(run)
    run.beat([1], ago=30, beat_ago=20)
    row = next(row for row in source.read(ALL).ranks if row.rank == 1)
    assert row.state == "stale" and row.heartbeat == pytest.approx(20, abs=2)
    assert "no heartbeat from rank 1 for 20 s" in source.read(ALL).verdict.text
    # Its heart cannot beat without a core.
    monkeypatch.setattr(ProcessStates, "lacks_core", lambda *_: True)
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_RUNNING)
    row = next(row for row in source.read(ALL).ranks if row.rank == 1)
    assert (row.state, row.said) == ("running", "gets little CPU")
    assert "no heartbeat" not in source.read(ALL).verdict.text


def test_ranks_that_are_stopped_together(make: Make) -> None:
    rows = living(make(3)).read(ALL).ranks
    stopped = "its process is stopped (SIGSTOP)"
    stale = [replace(row, state="stale", heartbeat=9.0, said=stopped) for row in rows[:2]]

    def said(*rows: RankRow) -> str:
        return judge(rows, VerdictFacts(live=True)).text

    assert said(stale[0], rows[1]).endswith("no heartbeat from rank 0 for 9.0 s: " + stopped)
    assert said(*stale, rows[2]) == (
        "no heartbeat from ranks 0 and 1 for 9.0 s: their processes are stopped (SIGSTOP)"
    )
    other = replace(stale[1], said="its process is traced")
    assert said(stale[0], other) == "no heartbeat from ranks 0 and 1 for 9.0 s"


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
    debug = DebugRecord(time=1, rank=1, port=5679, state="ready")
    run.tell(debug)
    assert [row.state for row in source.read(ALL).ranks] == ["running", "running"]
    run.tell(replace(debug, state="attached"))
    run.tell(replace(debug, state="stopped", place="/job/train.py:40"))
    run.beat([0], phase=Phase.BACKWARD, ago=90)
    snapshot = source.read(ALL)
    assert snapshot.ranks[0].state == "debugger" and snapshot.ranks[0].debug_port == 5679
    assert [row.held for row in snapshot.ranks] == [True, False]
    assert snapshot.verdict.text == (
        "rank 1 has stopped in the debugger at train.py:40: the others wait for it"
    )
    # An editor attaches to all ranks, and stops one.
    other = replace(debug, rank=0, port=5678)
    run.tell(replace(other, state="attached"))
    assert source.read(ALL).verdict.text == snapshot.verdict.text
    run.tell(replace(other, state="stopped", place="/job/train.py:40"))
    assert source.read(ALL).verdict.text == "ranks 0 and 1 are in the debugger"
    run.tell(replace(debug, state="detached"))
    run.tell(replace(other, state="detached"))
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
    run.tell(SignalRecord(time=1, signal=2))
    run.exit(1, -2)
    verdict = source.read(ALL).verdict
    assert (verdict.text, verdict.rank) == ("the job was asked to stop, and is ending", None)


def test_ranks_that_wait_for_a_debugger_before_they_begin(make: Make) -> None:
    run = make(0)
    run.start()
    for rank in (0, 1):
        run.tell(DebugRecord(time=1, rank=rank, state="waits", port=5678 + rank))
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


def test_a_journal_without_a_ddp_group_is_searched_only_while_its_start_grows(
    tmp_path: Path,
) -> None:
    path, memory = tmp_path / "rank-0.jsonl", 1 << 20
    line = encode(SaveRecord(time=1, file="/tmp/a.pt", content="data", path="/job/t.py", line=1))
    path.write_bytes(line * 10)
    group, searched = run_files.ddp_group(path, memory)
    assert (group, searched) == ((), 10 * len(line))
    ddp = encode(DdpRecord(device="cuda:0", group_ranks=(0, 1), path="/job/t.py", line=2))
    with path.open("ab") as file:
        file.write(ddp)
        assert run_files.ddp_group(path, memory, searched) == ((), searched)
        file.write(line * 20)
        file.flush()
    assert run_files.ddp_group(path, memory, searched)[0] == (0, 1)
    path.write_bytes(line * (300_000 // len(line)))
    group, searched = run_files.ddp_group(path, memory)
    assert searched == 1 << 18
    # The start is known in full, so nothing is read again.
    path.write_bytes(ddp + line * 3000)
    assert run_files.ddp_group(path, memory, searched) == ((), searched)
