"""``ddpdoctor scale`` from its command line to the runs, and overrides in a rank."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.commands import scale
from ddpdoctor.core.errors import HANG, DoctorError
from ddpdoctor.core.options import Given, Passed
from ddpdoctor.render.terminal import StatusLine
from ddpdoctor.run import rundir
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.process import OverrideRecord
from ddpdoctor.scale import session
from ddpdoctor.scale.results import Planned, launch_from
from ddpdoctor.scale.session import Session
from tests.conftest import JOBS, Doctor
from tests.support.launching import wait_until
from tests.support.scale_runs import planned, steps, write_run

TRAIN = str(JOBS / "train.py")


# -- bad input


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ([], "no script to run", "ddpdoctor scale --nproc 1,2"),
        (["--nproc", "0", TRAIN], "option --nproc needs numbers of ranks, each from 1", ""),
        (["--nproc", "1,,2", TRAIN], "option --nproc needs numbers of ranks", ""),
        (["--nproc", "9999", TRAIN], "option --nproc needs numbers of ranks", ""),
        (["--repeat", "0", TRAIN], "option --repeat needs a number from 1 to 1000", ""),
        (["--try", "bucket_cap_mb", TRAIN], "option --try needs NAME=VALUE,VALUE", ""),
        (["--try", "lr=1", TRAIN], "--try lr: not known", "bucket_cap_mb"),
        (["--try", "ddp=apex", TRAIN], "--try ddp: not known", "comm_hook"),
        (["--try", "bucket_cap_mb=1,x", TRAIN], "bucket_cap_mb needs a number of", ""),
        (["--try", "static_graph=2", TRAIN], "static_graph needs true or false, not '2'", ""),
        (["--compare", "torch,horovod", TRAIN], "option --compare needs torch,apex", ""),
        (["--compare", "torch,apex", TRAIN], "--compare apex needs NVIDIA Apex", "leave apex out"),
        (["--weak", "--strong", TRAIN], "--weak and --strong are two ways", "choose one"),
        (["--plot", "a.pdf", TRAIN], "--plot a.pdf: the name must end in .svg or .png", ""),
        (["--plot", "gone/a.svg", TRAIN], "--plot gone/a.svg: there is no such directory", ""),
        (["--plot", "/proc/a.svg", TRAIN], "--plot /proc/a.svg: no file can be written there", ""),
        (["--nproc-per-node", "2", TRAIN], "--nproc-per-node is what scale varies", "--nproc"),
        (["--nnodes", "1,2", TRAIN], "several nodes need --node-rank", "start it on each"),
        (["--", "python", TRAIN], "python starts the ranks itself", "name the script alone"),
        (["gone.py"], "gone.py: no such file", ""),
        (["--nprocs", "2", TRAIN], "unknown option --nprocs", "did you mean --nproc?"),
    ],
)
def test_bad_input_is_one_clear_line(
    words: list[str], message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DoctorError) as raised:
        scale.main(words)
    assert message in raised.value.message
    assert hint in raised.value.hint
    assert raised.value.status == 2


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "visible", lambda environ: 2)
    with pytest.raises(DoctorError, match="4 ranks on a node need 4 GPUs, and 2 are visible"):
        scale.main(["--nproc", "1,2,4", TRAIN])


def test_apex_needs_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "visible", lambda environ: 0)
    monkeypatch.setattr(scale, "_is_there", lambda module: True)
    with pytest.raises(DoctorError, match="--compare apex needs GPUs, and none is visible"):
        scale.main(["--compare", "torch,apex", "--nproc", "1", TRAIN])


def test_a_package_that_cannot_be_imported_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("raise RuntimeError('no CUDA')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not scale._is_there("broken_package.parallel")


def test_a_png_needs_pillow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DoctorError, match=r"PNG needs Pillow 10.1 or later, which is"):
        scale.main(["--plot", str(tmp_path / "a.png"), "--nproc", "1", TRAIN])


@pytest.mark.parametrize(("gpus", "wanted"), [(0, (1, 2)), (1, (1,)), (6, (1, 2, 4))])
def test_sizes_without_a_word(
    gpus: int, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "visible", lambda environ: gpus)
    assert scale._default_sizes({}) == wanted


def test_published_figures_need_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--reference"]) == 0
    assert "V100-PCIE-32G" in capsys.readouterr().out


# -- the runs


def test_old_directories_of_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "private_base", lambda: tmp_path)
    live = rundir.create_series(None)
    live.rename(tmp_path / "scale-0")
    (tmp_path / "scale-0" / "001").mkdir()
    lock = rundir.Lock(tmp_path / "scale-0" / "001")
    for _ in range(rundir.MAX_SERIES + 3):
        newest = rundir.create_series(None)
    left = {each.name for each in tmp_path.iterdir()}
    assert {newest.name, "scale-0"} <= left
    assert len(left) == rundir.MAX_SERIES + 1
    lock.close()
    rundir.create_series(None)
    assert not (tmp_path / "scale-0").exists()


def given(*passed: tuple[str, str], rest: Sequence[str] = ("train.py",)) -> Given:
    found = Given(rest=list(rest))
    found.passed = [Passed(name, (name, value), value) for name, value in passed]
    return found


def test_one_node_gets_a_free_port() -> None:
    made = launch_from(given(("--max-restarts", "0")), (1,))
    assert made.words(planned(2)) == [
        "--max-restarts", "0", "--standalone", "--nproc-per-node", "2", "--", "train.py",
    ]  # fmt: skip
    chosen = launch_from(given(("--master_port", "29511")), (1,))
    assert "--standalone" not in chosen.words(planned(2))


def test_several_nodes_meet_at_another_port_in_each_run() -> None:
    options = (("--node_rank", "1"), ("--rdzv-endpoint", "node0:29600"), ("--rdzv-id", "x"))
    made = launch_from(given(*options), (1, 2))
    assert not made.takes_part(planned(2))
    two = Planned(7, planned(4, nodes=2).size, planned().variant, 1)
    assert made.takes_part(two)
    assert made.words(two) == [
        "--rdzv-conf", "timeout=3600", "--nnodes", "2", "--node-rank", "1", "--master-addr",
        "node0", "--master-port", "29606", "--nproc-per-node", "2", "--", "train.py",
    ]  # fmt: skip
    alone = launch_from(given(("--node-rank", "0"), ("--master-addr", "node0")), (1, 2))
    assert "--standalone" in alone.words(planned(2))
    with pytest.raises(DoctorError, match="--node-rank 2 is not one of the 2 nodes"):
        launch_from(given(("--node-rank", "2"), ("--rdzv-endpoint", "node0")), (1, 2))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Runs are written by hand; what they were started with, and what comes of them by ranks."""
    facts: dict[str, Any] = {"overrides": [], "words": [], "records": {}, "status": {}, "ddp": True}

    def start(
        of: Planned, words: Sequence[str], overrides: dict[str, str], folder: Path, step: Any
    ) -> tuple[Path, Path, int]:
        facts["overrides"].append(overrides)
        facts["words"].append(list(words))
        ranks, step_count = of.size.ranks, step(3)
        assert step_count is None
        result = facts["records"].get(ranks, steps(wait=ranks - 1))
        if isinstance(result, BaseException):
            raise result
        status = facts["status"].get(ranks, 0)
        samples = int(overrides.get("batch_size", 8)) if facts.get("obeys", True) else 8
        records = [{**each, "samples": samples} for each in result]
        path = write_run(folder / of.directory, ranks, records, status=status, ended=status == 0)
        log = folder / f"{of.directory}.log"
        log.write_text("the last line\n")
        return path, log, status

    monkeypatch.setattr(session, "run_once", start)
    monkeypatch.setattr(scale, "stop_at_signals", lambda: None)
    facts["folder"] = tmp_path / "runs"
    return facts


def run(started: dict[str, Any], *words: str) -> int:
    return scale.main(["--run-dir", str(started["folder"]), *words, TRAIN, "--steps", "9"])


def kept(started: dict[str, Any]) -> Any:
    return json.loads((started["folder"] / "scale.json").read_text())


def test_all_sizes_are_run_and_printed(
    started: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(started, "--nproc", "1,2", "--repeat", "2", "--reference", "--quiet") == 0
    out, err = capsys.readouterr()
    assert out.startswith("train.py: median of 2 runs of each size, without its first 5 steps\n")
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("kept in"))
    assert "published: ResNet-50" in out
    assert err.splitlines()[1] == "run 2 of 4: 2 ranks: 65.0 ms an iteration, 246 samples/s"
    assert started["words"][0] == [
        "--quiet", "--standalone", "--nproc-per-node", "1", "--", TRAIN, "--steps", "9",
    ]  # fmt: skip
    assert [row["ranks"] for row in kept(started)["rows"]] == [1, 2]


def test_json_and_a_plot(started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    picture = started["folder"].parent / "a.svg"
    assert run(started, "--nproc", "1,2", "--repeat", "1", "--json", "--plot", str(picture)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][1]["efficiency"] == pytest.approx(64 / 65)
    assert "efficiency" in picture.read_text()


def test_a_size_that_hangs_is_not_repeated_and_the_others_go_on(
    started: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    started["status"][2] = HANG
    assert run(started, "--nproc", "1,2,4", "--repeat", "2") == 1
    out = capsys.readouterr().out
    assert "2 ranks: hung, and was ended" in out
    assert [row["ranks"] for row in kept(started)["rows"]] == [1, 2, 4]
    assert [len(row["runs"]) for row in kept(started)["rows"]] == [2, 1, 2]


def test_what_was_measured_is_kept_if_a_size_records_no_steps(
    started: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    started["records"][2] = []
    with pytest.raises(DoctorError, match=r"the job made no training steps \(2 ranks\)"):
        run(started, "--nproc", "1,2", "--repeat", "1")
    assert "    1  64.0" in capsys.readouterr().out
    assert kept(started)["rows"][0]["median"]["step"] == 0.064


@pytest.mark.parametrize(
    ("stop", "status"), [(KeyboardInterrupt(), 130), (session.Stopped(signal.SIGTERM), 143)]
)
def test_what_was_measured_is_kept_if_a_person_stops(
    stop: BaseException,
    status: int,
    started: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    started["records"][2] = stop
    assert run(started, "--nproc", "1,2", "--repeat", "1") == status
    assert "    1  64.0" in capsys.readouterr().out


def test_strong_scaling_divides_the_batch(
    started: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(started, "--nproc", "1,2,4", "--repeat", "1", "--strong") == 0
    assert started["overrides"] == [{}, {"batch_size": "4"}, {"batch_size": "2"}]
    assert kept(started)["rows"][2]["runs"][0]["overrides"] == {"batch_size": "2"}
    out = capsys.readouterr().out
    assert "samples of a rank in an iteration (ranks): 8 (1), 4 (2), 2 (4)\n" in out
    assert "the script is unchanged" in " ".join(out.split())


def test_weak_scaling_keeps_the_batch_of_a_rank(started: dict[str, Any]) -> None:
    tried = ("--try", "bucket_cap_mb=1", "--try", "batch_size=64")
    assert run(started, "--nproc", "1,2", "--repeat", "1", "--weak", *tried) == 0
    assert started["overrides"] == [
        {}, {"batch_size": "64"},
        {"batch_size": "8"}, {"bucket_cap_mb": "1", "batch_size": "8"}, {"batch_size": "64"},
    ]  # fmt: skip


def test_a_batch_that_does_not_divide(started: dict[str, Any]) -> None:
    with pytest.raises(DoctorError, match="a batch of 8 samples does not divide by 3 ranks"):
        run(started, "--nproc", "1,3", "--repeat", "1", "--strong")


def test_a_batch_that_the_script_makes_itself(started: dict[str, Any]) -> None:
    started["obeys"] = False
    with pytest.raises(DoctorError, match="--strong needs 4 samples a rank with 2 ranks, and the"):
        run(started, "--nproc", "1,2", "--repeat", "1", "--strong")


def test_a_full_disk_is_one_line(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundir, "put", full)
    with pytest.raises(DoctorError, match=r"cannot write .*scale.json: No space left on device"):
        run(started, "--nproc", "1", "--repeat", "1")


def test_a_terminal_has_a_line_of_progress() -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    line = StatusLine(screen)
    line.show("run 1 of 2: 1 rank: 7 steps")
    line.show("run 1 of 2: 1 rank: 7 steps")
    line.say("run 1 of 2: \x1b done")
    line.show("x" * 100)
    line.close()
    clear = "\r\x1b[K"
    assert screen.getvalue().split(clear)[1:] == [
        "run 1 of 2: 1 rank: 7 steps",
        "run 1 of 2: \\x1b done\n",
        "run 1 of 2: 1 rank: 7 steps",
        "x" * 76 + "...",
        "",
    ]


def test_nothing_planned_is_nothing_done(tmp_path: Path) -> None:
    session = Session(tmp_path, lambda each: [], 5, "", lambda outcomes: None)
    session.run([])
    assert session.outcomes == []


# -- real runs


@pytest.mark.slow
def test_one_and_two_ranks(doctor: Doctor) -> None:
    result = doctor.cli(
        "scale", "--nproc", "1,2", "--repeat", "1", "--json", "--run-dir", "runs", "--plot",
        "a.svg", "--try", "bucket_cap_mb=1", TRAIN, "--steps", "40",
    )  # fmt: skip
    assert result.status == 0, result.stderr
    one, two, tried = json.loads(result.stdout)["rows"]
    assert (one["ranks"], two["ranks"], tried["variant"]) == (1, 2, "bucket_cap_mb=1")
    for row in (one, two, tried):
        measured = row["median"]
        assert (measured["steps"], measured["samples"]) == (35, 16)
        parts = ("data", "forward", "backward", "optimizer")
        assert all(0 < measured[name] < measured["step"] for name in parts)
        # Of short steps, DDP's timers are those of each fourth.
        assert measured["exposed"] is not None
    assert two["median"]["bucket_bytes"] != 1 << 20
    assert tried["median"]["bucket_bytes"] == 1 << 20
    run = RunReader(Path(tried["runs"][0]["directory"])).snapshot()
    (record,) = run.ranks[0].records.of(OverrideRecord)
    assert (record.name, record.value, record.path) == ("bucket_cap_mb", "1.0", TRAIN)
    assert (doctor.directory / "a.svg").read_text().startswith("<svg")
    assert "run 3 of 3: 2 ranks, bucket_cap_mb=1: " in result.stderr


@pytest.mark.slow
def test_a_crash_with_two_ranks_leaves_the_others(doctor: Doctor) -> None:
    result = doctor.cli(
        "scale", "--nproc", "1,2", "--repeat", "1", TRAIN, "--steps", "12", "--fail", "exception"
    )
    assert result.status == 1
    assert "crashed: DDP901 rank 1 raised ValueError: the wrong sort of batch" in result.stdout
    assert result.stdout.count("crashed: ") == 2
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_hang_with_two_ranks_is_ended_and_diagnosed(doctor: Doctor) -> None:
    result = doctor.cli(
        "scale", "--nproc", "1,2", "--repeat", "1", "--hang-after", "3", TRAIN, "--steps", "12",
        "--fail", "stuck", "--at", "8",
    )  # fmt: skip
    assert result.status == 1
    assert "2 ranks: hung: DDP8" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_job_ends_with_the_command(number: int, doctor: Doctor) -> None:
    words = ("scale", "--nproc", "1,2", "--repeat", "1", "--run-dir", "runs", TRAIN)
    live = doctor.start(
        sys.executable, "-m", "ddpdoctor", *words, "--steps", "12", "--fail", "stuck", watch=False
    )
    wait_until(lambda: (doctor.directory / "runs" / "scale.json").exists())
    wait_until(lambda: any((doctor.directory / "runs").glob("002*/rank-0001*.jsonl")))
    os.kill(live.process.pid, number)
    result = live.finish()
    if number != signal.SIGKILL:
        assert result.status == 128 + number
        assert "efficiency" in result.stdout


@pytest.mark.slow
def test_two_nodes_started_by_hand(doctor: Doctor) -> None:
    port = 20000 + os.getpid() % 10000
    words = (sys.executable, "-m", "ddpdoctor", "scale", "--nnodes", "1,2", "--nproc", "1")
    meet = ("--repeat", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", "--json")
    lives = [
        doctor.start(
            *words, *meet, "--node-rank", str(node), "--run-dir", f"n{node}", TRAIN, "--steps",
            "12", watch=False,
        )
        for node in (0, 1)
    ]  # fmt: skip
    first, second = (live.finish() for live in lives)
    assert (first.status, second.status) == (0, 0), first.stderr + second.stderr
    assert [row["ranks"] for row in json.loads(first.stdout)["rows"]] == [1, 2]
    assert [row["ranks"] for row in json.loads(second.stdout)["rows"]] == [2]
