"""What the monitor reads: GPUs, output, findings, damaged files, hostile text."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import rundir
from ddpdoctor.run.records.base import json_line
from ddpdoctor.run.reported import Reported, to_journal
from ddpdoctor.top import output
from ddpdoctor.top.frame_sources import open_source
from ddpdoctor.top.frames import Visible
from ddpdoctor.top.live import LiveSource
from ddpdoctor.top.run_files import StampAges
from tests.supervise.test_showing import FOUND
from tests.support.generated import Generated, uuid
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
    snapshot = source.read(Visible(frozenset({1, 2, 9, 10})))
    output = {row.rank: row.output for row in snapshot.ranks if row.output}
    # Rank 10 has local rank 2, too, but on another node.
    assert output == {1: ("a red one",), 2: ("by local rank",), 9: ("x",)}
    assert snapshot.output[:2] == ("plain", "[rank1]: a red one") and "10%" in snapshot.output
    (run.path / rundir.STDERR).write_text("the end\n")
    assert source.read(ALL).output == ("the end",)


@pytest.mark.parametrize(
    "banner",
    [
        "W1123 08:00:00.119000 27481 torch/distributed/run.py:874] {}",
        "[2024-01-02 03:04:05,678] {}",
        "{}",
    ],
)
def test_torchruns_banner_is_no_output_of_the_job(make: Make, banner: str) -> None:
    run = make(1)
    source = living(run)
    said = (
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to "
        "avoid your system being overloaded, please further tune the variable"
    )
    if banner[0] == "[":
        banner = "[2024-01-02 03:04:05,678] torch.distributed.run: [WARNING] {}"
    lines = [banner.format(each) for each in ("", "*" * 41, said, "*" * 41)]
    mine = "W1123 08:00:01.1 27 torch/distributed/run.py:9] something else"
    (run.path / rundir.STDERR_SO_FAR).write_text("\n".join([*lines, mine, "*****"]))
    assert source.read(ALL).output == (mine, "*****")


def test_findings_come_with_their_time(make: Make) -> None:
    run = make(2)
    source = living(run)
    run.tell(to_journal(Reported(1, FOUND, 0), 5_000_000_000))
    run.tell(json_line({"kind": "finding", "nonsense": 1}))
    snapshot = source.read(ALL)
    (row,) = snapshot.findings
    assert (row.finding.code, row.time) == ("DDP610", 5.0)
    assert snapshot.verdict.text == "DDP610: rank 1 holds the others up"
    assert (snapshot.verdict.level, snapshot.verdict.rank) == ("warning", 1)


def test_ten_thousand_findings(make: Make) -> None:
    run = make(1)
    source = living(run)
    for number in range(10_000):
        run.tell(to_journal(Reported(number + 1, FOUND, 0), number + 1))
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
        output.of_record(output.loads(output.line(snapshot).encode()))
    run.close()
    source.close()


def test_ranks_out_of_sight_are_read_every_other_time(make: Make) -> None:
    run = make(100)
    source = living(run)
    source.read(Visible(frozenset({7})))
    run.steps(1)
    for frames, fresh in ((1, 50), (2, 100)):
        rows = source.read(Visible(frozenset({7}))).ranks
        assert sum(row.step == 31 for row in rows) in (fresh, fresh + 1), frames
        assert next(row.step for row in rows if row.rank == 7) == 31
    run.exit(8, -9)
    run.exit(9, -9)
    rows = source.read(Visible(frozenset({7}))).ranks
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
    ages = StampAges()
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


# -- choosing


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's runs, somewhere else."""
    path = tmp_path / "base"
    path.mkdir(mode=0o700)
    monkeypatch.setattr(rundir, "base_directory", lambda: path)
    return path


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\n"
        "from ddpdoctor.top.frame_sources import open_source\n"
        "from ddpdoctor.top.frames import Visible\n"
        "open_source(None, demo=True).read(Visible())\n"
        "import ddpdoctor.top.live, ddpdoctor.top.frame_sources, ddpdoctor.top.recording\n"
        "import ddpdoctor.top.frame_sources, ddpdoctor.top.output\n"
        "bad = {'torch', 'textual', 'numpy', 'rich', 'prometheus_client'}\n"
        "bad.add('ddpdoctor.diagnose.all_rules')\n"
        "print(sorted(bad & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
