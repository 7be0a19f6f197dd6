"""Whom the monitor names as slow, and why."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.run.records.supervisor import (
    FindingRecord,
    HangOverRecord,
    HangRecord,
    RetractionRecord,
)
from ddpdoctor.run.records.training import PassRecord, StepRecord
from ddpdoctor.run.reported import Reported, Withdrawn, to_journal
from ddpdoctor.run.status import Phase
from ddpdoctor.top import live, output, run_files
from ddpdoctor.top.frame_sources import open_source
from ddpdoctor.top.frames import Visible
from ddpdoctor.top.live import LiveSource, Progress
from ddpdoctor.top.snapshot import Job, Snapshot
from tests.conftest import LIMIT, Doctor
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


# -- live runs


def straggler(rank: int) -> FindingRecord | RetractionRecord:
    finding = Finding("DDP610", Severity.WARNING, f"rank {rank} holds the others up", (rank,))
    return to_journal(Reported(610, finding, 0), 1)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 1024])
def test_runs_of_any_size(make: Make, ranks: int) -> None:
    slow = {ranks - 1: ("data", 30)} if ranks > 1 else {}
    run = make(ranks, slow=slow, gpus=True)
    source = living(run)
    if ranks > 1:
        run.tell(straggler(ranks - 1))
    snapshot = source.read(Visible(frozenset({0})))
    assert len(snapshot.ranks) == snapshot.world_size == ranks
    assert {row.state for row in snapshot.ranks} == {"running"}
    first = snapshot.ranks[0]
    if ranks > 1:
        assert first.rank == snapshot.verdict.rank == ranks - 1
        assert snapshot.verdict.text == f"DDP610: rank {ranks - 1} holds the others up"
        assert snapshot.verdict.phase == "data"
        assert snapshot.skew == pytest.approx(65 / 50 if ranks == 2 else 65 / 35)
    assert first.times is not None and first.times.own == pytest.approx(
        0.065 if ranks > 1 else 0.035
    )
    row = next(row for row in snapshot.ranks if row.rank == 0)
    assert (row.node, row.local_rank, row.step, row.epoch) == ("node-0", 0, 30, 0)
    assert (snapshot.state, snapshot.job.step, snapshot.job.epoch) == ("running", 30, 0)
    assert first.times is not None and snapshot.median is not None
    assert snapshot.job.rate == pytest.approx(1 / first.times.total, rel=0.01)
    assert (row.rss, row.allocated, row.reserved, row.peak) == (1 << 30, 1 << 28, 1 << 29, 3 << 27)
    assert snapshot.notes == ()
    assert output.of_record(output.loads(output.line(snapshot).encode())) == snapshot


def test_the_victim_is_not_blamed(make: Make) -> None:
    # Rank 1 computes longer; rank 0's step is as long, spent waiting.
    source = living(make(2, slow={1: ("backward", 40)}))
    snapshot = source.read(ALL)
    assert [row.rank for row in snapshot.ranks] == [1, 0]
    one, zero = snapshot.ranks
    assert one.times is not None and zero.times is not None
    assert zero.times.total == pytest.approx(one.times.total)
    assert zero.times.wait - one.times.wait == pytest.approx(0.040)
    # Only the rules say who is slow, and they have said nothing.
    assert (snapshot.verdict.rank, snapshot.verdict.level) == (None, "ok")


def test_a_rank_that_turns_slow_is_seen_on_its_page_alone(make: Make) -> None:
    run = make(4)
    source = living(run)
    assert source.read(Visible(frozenset())).verdict.level == "ok"
    for rank, each in run.every.items():
        phase = "forward" if rank == 2 else "wait"
        each.parts = each.parts._replace(**{phase: getattr(each.parts, phase) + 30 * MS})
    for _ in range(run_files.WINDOW // 2 + 1):
        run.steps(1)
        snapshot = source.read(Visible(frozenset()))
    first = snapshot.ranks[0]
    assert first.rank == 2 and first.times is not None
    assert first.times.forward > snapshot.ranks[1].times.forward + 0.01  # type: ignore[union-attr]


def test_nothing_is_said_of_the_first_steps(make: Make) -> None:
    run = make(2, slow={1: ("data", 500)})
    source = living(run, steps=9)
    assert "too early" in source.read(ALL).verdict.text
    run.steps(30)
    assert source.read(ALL).verdict.text.startswith("no rank holds the others up")


def test_ranks_are_shown_with_their_stages(make: Make) -> None:
    run = make(4)
    for number, rank in run.every.items():
        rank.page.set_stage([number % 2])
    snapshot = living(run).read(ALL)
    assert {row.rank: row.stage for row in snapshot.ranks} == {0: "0", 1: "1", 2: "0", 3: "1"}


@pytest.mark.parametrize(("cpu", "lacked"), [(35, 40), (70, 5)])
def test_a_rank_that_gets_no_core_is_shown_so(make: Make, cpu: int, lacked: int) -> None:
    """Unless it is its work that takes long. By its status page, and by its journal."""
    run = make(2, slow={1: ("forward", 40)})
    run.every[1].parts = run.every[1].parts._replace(cpu=cpu * MS, waited=41 * MS)
    run.every[0].parts = run.every[0].parts._replace(cpu=33 * MS)
    source = living(run)
    for _ in range(run_files.WINDOW):
        # What the journal said is older now than what the medians are made of.
        run.steps(1)
        snapshot = source.read(Visible(frozenset()))
    for seen in (snapshot, LiveSource(run.path, 1.0).read(ALL)):
        row = next(row for row in seen.ranks if row.rank == 1)
        assert row.times is not None and row.times.lacked == pytest.approx(lacked / 1000)
        assert output.of_record(output.loads(output.line(seen).encode())) == seen


def test_an_unsplit_backward_blames_nobody_for_it(make: Make) -> None:
    run = make(2, slow={1: ("backward", 40)})
    run.start()
    run.steps(40, split=False)
    source = LiveSource(run.path, 1.0)
    snapshot = source.read(ALL)
    assert snapshot.verdict.rank is None
    assert snapshot.ranks[0].times is not None and not snapshot.ranks[0].times.split


def test_split_steps_count_where_they_are_rare(make: Make) -> None:
    run = make(2, slow={1: ("backward", 40)})
    run.start()
    for _ in range(8):
        run.steps(1)
        run.steps(3, split=False)
    slow, victim = LiveSource(run.path, 1.0).read(ALL).ranks
    assert slow.times is not None and victim.times is not None
    assert slow.rank == 1 and slow.times.split
    assert victim.times.wait - slow.times.wait == pytest.approx(0.040)


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


def test_verdicts_are_one_line_and_whole(make: Make) -> None:
    run = make(1024)
    source = living(run)
    run.error(1000, "ValueError", "x " * 100 + "\nend")
    run.exit(1000, 1)
    text = source.read(Visible(frozenset())).verdict.text
    assert text.startswith("rank 1000 died: ValueError: x x") and text.endswith("(train.py:12)")
    assert "\n" not in text


def reported(code: str, severity: Severity, ranks: tuple[int, ...]) -> Reported:
    finding = Finding(code, severity, f"what {code} says", ranks)
    return Reported(int(code[3:]), finding, 0)


def test_the_headline_is_the_finding_that_stands(make: Make) -> None:
    """A proven hang is not replaced by what is seen of it, nor by another error."""
    run = make(4)
    source = living(run)
    run.beat(phase=Phase.WAIT, ago=42, collective="all_reduce")
    assert source.read(ALL).verdict.text == "all 4 ranks wait in all_reduce for 42 s"
    run.tell(to_journal(reported("DDP302", Severity.ERROR, ()), 1))
    assert source.read(ALL).verdict.text == "all 4 ranks wait in all_reduce for 42 s"
    run.tell(to_journal(reported("DDP401", Severity.ERROR, (2,)), 2))
    verdict = source.read(ALL).verdict
    assert (verdict.text, verdict.level, verdict.rank) == ("DDP401: what DDP401 says", "error", 2)
    withdrawn = Withdrawn(9, reported("DDP401", Severity.ERROR, (2,)), "over", "it goes on")
    run.tell(to_journal(withdrawn, 3))
    run.beat(phase=Phase.FORWARD)
    assert source.read(ALL).verdict.text == "DDP302: what DDP302 says"


def test_a_slow_rank_is_marked_beside_a_finding_of_all_ranks(make: Make) -> None:
    run = make(3, slow={1: ("forward", 30)})
    source = living(run)
    run.tell(straggler(1))
    run.tell(to_journal(reported("DDP104", Severity.WARNING, ()), 2))
    verdict = source.read(ALL).verdict
    assert (verdict.text, verdict.rank, verdict.phase) == ("DDP104: what DDP104 says", 1, "forward")


@pytest.mark.parametrize("status", [0, 1])
def test_the_end_says_what_was_wrong(make: Make, status: int) -> None:
    run = make(2)
    source = living(run)
    run.tell(to_journal(reported("DDP901", Severity.ERROR, (1,)), 1))
    run.end(status)
    snapshot = source.read(ALL)
    how = "failed with exit status 1" if status else "succeeded"
    assert snapshot.verdict.text == f"the job {how} after 60 s; DDP901: what DDP901 says"
    assert (snapshot.verdict.level, snapshot.verdict.rank) == ("error", 1)
    assert snapshot.state == ("failed" if status else "ended")


def test_states_of_a_run(make: Make) -> None:
    run = make(2)
    source = living(run)
    assert source.read(ALL).state == "running"
    run.tell(HangRecord(time=1, number=1, restart=0, seconds=10.0))
    assert source.read(ALL).state == "hung"
    run.tell(HangOverRecord(time=2, number=1))
    assert source.read(ALL).state == "running"
    run.exit(1, 1)
    assert source.read(ALL).state == "failing"
    shutil.rmtree(run.path)
    assert source.read(ALL).state == "gone"


def test_a_restart_is_a_state(make: Make) -> None:
    run = make(2)
    manifest = json.loads((run.path / "run.json").read_text())
    manifest["command"] = ["torchrun", "--max-restarts=2", "train.py", "--epochs", "5"]
    (run.path / "run.json").write_text(json.dumps(manifest))
    source = living(run)
    assert source.read(ALL).job.attempts == 3
    run.tell(to_journal(reported("DDP901", Severity.ERROR, (1,)), 1))
    run.exit(1, 1)
    assert source.read(ALL).state == "restarting"
    again = make(2, restart=1)
    again.beat(phase=Phase.STARTING)
    source._listed = float("-inf")
    snapshot = source.read(ALL)
    assert (snapshot.state, snapshot.job.attempt) == ("restarting", 1)
    assert snapshot.verdict.text.startswith("starting: 2 ranks have joined")
    again.steps(30)
    snapshot = source.read(ALL)
    assert (snapshot.state, snapshot.verdict.level) == ("running", "ok")
    assert [row.attempt for row in snapshot.findings] == [0]


def test_how_far_a_job_is() -> None:
    def job(*words: str, step: int = 100, epoch: int = 2, batches: int = 0) -> Job:
        progress = Progress({"command": ["torchrun", "train.py", *words]})
        if batches:
            progress.add_pass(
                PassRecord(pass_=0, number=0, state="", batches=batches, marks=1), None
            )
        line = StepRecord(epoch=epoch, samples=16, loss=0.5)
        return progress.job(0, step, epoch, 2.0, [line], 4)

    plain = job()
    assert (plain.steps, plain.left, plain.loss, plain.samples_rate) == (None, None, 0.5, 128.0)
    assert job("--max_steps", "500").left == 200.0
    assert job("--num-train-epochs=10", batches=40).steps == 400
    # Counted from 1; resumed at the sixth; an epoch whose length is not known.
    assert job("--epochs", "10", epoch=3, batches=40).steps == 400
    assert job("--epochs", "10", epoch=7, batches=40).steps == 200
    assert job("--epochs", "10").steps is None


def test_the_rate_falls_where_no_step_ends() -> None:
    progress = Progress({})
    assert progress.rate(0.0, 10, 0.5) == 2.0
    for second in range(1, 40):
        rate = progress.rate(float(second), 10 + min(second, 20), 0.5)
    assert rate is not None and 0.2 < rate < 0.5
    assert progress.rate(80.0, 30, 0.5) == 0.0


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
    assert not end.live and ", because it was asked to stop" in end.verdict.text
