"""Whom the monitor names as slow, and why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.run.status import Phase
from ddpdoctor.top import live, output, times
from ddpdoctor.top.choosing import open_source
from ddpdoctor.top.live import LiveSource
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.top.source import Want
from tests.conftest import LIMIT, Doctor
from tests.generated import MS, USUAL, Generated
from tests.top_runs import ALL, Make, living


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
    assert output.read(output.line(snapshot)) == snapshot


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
        assert output.read(output.line(seen)) == seen


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


def test_verdicts_are_short(make: Make) -> None:
    run = make(1024)
    source = living(run)
    run.error(1000, "ValueError", "x" * 500)
    run.exit(1000, 1)
    assert len(source.read(Want(frozenset())).verdict.text) <= 100
    run.beat(range(0, 1000, 2), beat_ago=99, ago=99)
    assert len(source.read(Want(frozenset())).verdict.text) <= 100


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
