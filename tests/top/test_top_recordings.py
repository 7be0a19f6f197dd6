"""Recordings, one line of JSON an interval, the machine without a run, the demonstration."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import rundir
from ddpdoctor.top import output
from ddpdoctor.top import recording as recording_module
from ddpdoctor.top.frame_sources import RunSource, live_runs, open_source
from ddpdoctor.top.recording import Recording, RecordingSource
from ddpdoctor.top.snapshot import Snapshot
from tests.support.generated import Generated
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


# -- recordings and other output


def test_what_is_not_known_is_absent(make: Make) -> None:
    told = json.loads(output.line(living(make(1)).read(ALL)))

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
    source, recording = recording_module.DemoSource(0.5, lambda: now[0]), Recording(str(path))
    frames = []
    for _ in range(6):
        frames.append(source.read(ALL))
        recording.add(frames[-1])
        recording.add(frames[-1])
        now[0] += 0.5
    recording.close()
    with path.open("ab") as file:
        file.write(gzip.compress(b'{"format":1,"torn')[:-9])
    played = open_source(None, demo=False, replay=str(path))
    assert isinstance(played, RecordingSource) and played.replay is played
    assert (played.length, played.position, played.interval) == (6, 0, 0.5)
    for position in (0, 1, 2, 3, 4, 5, 2, 5, 0):
        played.seek(position)
        assert_same(played.read(ALL), frames[position])
    assert [each.job.step for each in played.history()] == [each.job.step for each in frames]
    assert played.position == 0
    played.close()


def assert_same(played: Snapshot, shown: Snapshot) -> None:
    """But for the digits of its numbers."""

    def flat(of: Any, name: str = "") -> Iterator[tuple[str, Any]]:
        each = of.items() if isinstance(of, dict) else enumerate(of)
        for key, value in each:
            if isinstance(value, (dict, list)):
                yield from flat(value, f"{name}.{key}")
            else:
                yield f"{name}.{key}", value

    before, after = dict(flat(output.record(shown))), dict(flat(output.record(played)))
    assert before.keys() == after.keys()
    for name, value in before.items():
        if isinstance(value, float):
            assert after[name] == pytest.approx(value, rel=1e-3), name
        else:
            assert after[name] == value, name


def test_a_long_recording_is_small_and_read_from_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recording = Recording(str(path))
    for second in range(250):
        recording.add(recording_module.at(700 + second, 1000 + second))
    # What a monitor that is killed has written is there.
    assert path.stat().st_size < 1000 * 250
    played = RecordingSource(str(path))
    assert played.length == 250
    played.close()
    recording.close()
    played = RecordingSource(str(path))
    for position in (249, 3, 130, 119, 120, 248):
        played.seek(position)
        assert_same(played.read(ALL), recording_module.at(700 + position, 1000 + position))
    lines = gzip.decompress(path.read_bytes()).splitlines()
    assert len(lines) == 250 and json.loads(lines[0])["kind"] == "demo"
    played.close()


def test_ranks_that_come_and_go_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recording = Recording(str(path))
    frames = [
        replace(frame, ranks=frame.ranks[:ranks])
        for n, ranks in enumerate((2, 8, 1, 4))
        for frame in [recording_module.at(700 + n, 1000 + n)]
    ]
    for frame in frames:
        recording.add(frame)
    recording.close()
    played = RecordingSource(str(path))
    for position, frame in enumerate(frames):
        played.seek(position)
        assert_same(played.read(ALL), frame)
    played.close()


def test_a_damaged_frame_is_one_frame(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recording = Recording(str(path))
    recording.add(recording_module.at(700, 1000))
    recording.close()
    whole = path.read_bytes()
    path.write_bytes(whole + gzip.compress(b"nonsense\n") + whole)
    source = RecordingSource(str(path))
    source.seek(1)
    assert "frame 2" in source.read(ALL).verdict.text
    source.seek(2)
    assert len(source.read(ALL).ranks) == 8
    assert len(list(source.history())) == 3
    source.close()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    "content", [b"", b"nonsense\n", b'{"format":99}\n', b"[]\n", b'{"kind":1}', b"{}\n"]
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, zipped: bool) -> None:
    path = tmp_path / "recording"
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(DoctorError, match="not a recording"):
        RecordingSource(str(path))
    with pytest.raises(DoctorError, match="exists already"):
        Recording(str(path))
    with pytest.raises(DoctorError, match="cannot read"):
        RecordingSource(str(tmp_path / "none"))


@pytest.mark.parametrize(("version", "words"), [(None, "format 1"), (99, "format 99")])
def test_a_recording_of_another_version_is_refused(
    tmp_path: Path, version: int | None, words: str
) -> None:
    path = tmp_path / "recording"
    record = output.record(recording_module.at(700, 1000))
    line = json.dumps(record if version is None else {"recording": version, **record})
    path.write_bytes(gzip.compress(line.encode() + b"\n"))
    with pytest.raises(DoctorError, match=f"it is of {words}, this ddpdoctor reads format 2"):
        RecordingSource(str(path))


def test_one_line_per_interval_until_the_run_is_over(make: Make) -> None:
    run = make(2)
    run.start()
    run.steps(30)
    source = RunSource(run.path, 1.0)
    out, slept = io.StringIO(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            run.end(0)

    output.watch(source, out, sleep=sleep)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["live"] for line in lines] == [True, True, True, False]
    assert min(slept) >= 0
    out = io.StringIO()
    output.watch(RunSource(run.path, 1.0), out, sleep=sleep)
    assert len(out.getvalue().splitlines()) == 31
    out = io.StringIO()
    output.once(RunSource(run.path, 1.0), out)
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
    assert recording_module.at(700, 1000) == recording_module.at(700, 1000)
    snapshot = open_source(None, demo=True).read(ALL)
    assert (snapshot.kind, len(snapshot.ranks), len(snapshot.gpus)) == ("demo", 8, 8)
    assert {row.node for row in snapshot.ranks} == {"node-a", "node-b"}
    assert snapshot.verdict.rank == snapshot.ranks[0].rank == 5
    assert "data loading" in snapshot.verdict.text
    for row in snapshot.ranks:
        assert row.times is not None and row.times.total == pytest.approx(0.221, abs=0.01)
