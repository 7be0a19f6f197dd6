"""``ddpdoctor scale`` from its command line to the runs, and overrides in a rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddpdoctor.commands import scale
from ddpdoctor.core.errors import HANG, DoctorError
from ddpdoctor.core.options import Given, Passed
from ddpdoctor.probe.hooks import overrides as hooks
from ddpdoctor.probe.runtime import rank
from ddpdoctor.run import overrides, rundir
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.process import OverrideRecord
from ddpdoctor.scale import running
from ddpdoctor.scale.launch import launch
from ddpdoctor.scale.plan import Planned
from ddpdoctor.scale.session import Session
from tests.conftest import JOBS, Doctor
from tests.launching import wait_until
from tests.scale_runs import planned, steps, write_run

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


def test_a_png_needs_pillow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DoctorError, match="PNG needs Pillow, which is not installed"):
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
    for _ in range(rundir.KEEP_SERIES + 3):
        newest = rundir.create_series(None)
    left = sorted(tmp_path.iterdir())
    assert len(left) == rundir.KEEP_SERIES
    assert newest in left


def given(*passed: tuple[str, str], rest: Sequence[str] = ("train.py",)) -> Given:
    found = Given(rest=list(rest))
    found.passed = [Passed(name, (name, value), value) for name, value in passed]
    return found


def test_one_node_gets_a_free_port() -> None:
    made = launch(given(("--max-restarts", "0")), (1,))
    assert made.words(planned(2)) == [
        "--max-restarts", "0", "--standalone", "--nproc-per-node", "2", "--", "train.py",
    ]  # fmt: skip
    chosen = launch(given(("--master_port", "29511")), (1,))
    assert "--standalone" not in chosen.words(planned(2))


def test_several_nodes_meet_at_another_port_in_each_run() -> None:
    options = (("--node_rank", "1"), ("--rdzv-endpoint", "node0:29600"), ("--rdzv-id", "x"))
    made = launch(given(*options), (1, 2))
    assert not made.takes_part(planned(2))
    two = Planned(7, planned(4, nodes=2).size, planned().variant, 1)
    assert made.takes_part(two)
    assert made.words(two) == [
        "--rdzv-conf", "timeout=3600", "--nnodes", "2", "--node-rank", "1", "--master-addr",
        "node0", "--master-port", "29606", "--nproc-per-node", "2", "--", "train.py",
    ]  # fmt: skip
    alone = launch(given(("--node-rank", "0"), ("--master-addr", "node0")), (1, 2))
    assert "--standalone" in alone.words(planned(2))
    with pytest.raises(DoctorError, match="--node-rank 2 is none of 2 nodes"):
        launch(given(("--node-rank", "2"), ("--rdzv-endpoint", "node0")), (1, 2))


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

    monkeypatch.setattr(running, "start", start)
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
    assert out.startswith("train.py: the median of 2 runs, the first 5 steps of each left out\n")
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
    ("stop", "status"), [(KeyboardInterrupt(), 130), (running.Stopped(signal.SIGTERM), 143)]
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


def test_nothing_planned_is_nothing_done(tmp_path: Path) -> None:
    session = Session(tmp_path, lambda each: [], 5, "", lambda outcomes: None)
    session.run([])
    assert session.outcomes == []


# -- overrides in a rank


def test_overrides_are_read_from_the_environment() -> None:
    assert overrides.parse("bucket_cap_mb=2.5 num_workers=0 static_graph=true") == {
        "bucket_cap_mb": 2.5, "num_workers": 0, "static_graph": True,
    }  # fmt: skip
    for wrong in ("lr=1", "num_workers=-1", "bucket_cap_mb=0", "comm_hook=x", "accumulation=0"):
        with pytest.raises(ValueError, match=r"lr|-1|0|x"):
            overrides.parse(wrong)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[OverrideRecord]:
    records: list[OverrideRecord] = []
    monkeypatch.setattr(rank, "add", lambda record, most, once: records.append(record))
    return records


Noted = list[OverrideRecord]


def ddp_with(monkeypatch: pytest.MonkeyPatch, wanted: str) -> Any:
    """A class that is torch's DDP with overrides."""
    ddp_class = type("DistributedDataParallel", (DistributedDataParallel,), {})
    monkeypatch.setenv(overrides.VARIABLE, wanted)
    hooks.install_ddp(SimpleNamespace(DistributedDataParallel=ddp_class))  # type: ignore[arg-type]
    return ddp_class


def test_arguments_of_ddp(group: None, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp_class = ddp_with(monkeypatch, "bucket_cap_mb=2 gradient_as_bucket_view=true num_workers=3")
    ddp = ddp_class(nn.Linear(2, 2), None, bucket_cap_mb=50)
    assert ddp.bucket_bytes_cap == 2 << 20
    assert ddp.gradient_as_bucket_view
    assert [(each.owner, each.name, each.value, each.was) for each in noted] == [
        ("DistributedDataParallel", "bucket_cap_mb", "2.0", "50"),
        ("DistributedDataParallel", "gradient_as_bucket_view", "True", ""),
    ]
    assert noted[0].path == __file__


def test_a_mistake_of_the_script_stays_torchs_to_report(
    group: None, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'buckets'"):
        ddp_with(monkeypatch, "bucket_cap_mb=2")(nn.Linear(2, 2), buckets=3)
    assert not noted


def test_a_comm_hook_takes_the_place_of_the_scripts(
    group: None, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddp = ddp_with(monkeypatch, "comm_hook=fp16_compress")(nn.Linear(2, 2))
    ddp.register_comm_hook(None, lambda state, bucket: None)
    ddp(torch.full((1, 2), 1 / 3)).sum().backward()
    gradient = ddp.module.weight.grad
    assert gradient[0, 0].item() == torch.tensor(1 / 3).half().item()


def test_accumulation_reduces_seldom(
    group: None, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddp = ddp_with(monkeypatch, "accumulation=3")(nn.Linear(2, 2))
    reduced: list[Any] = []

    def result(bucket: Any) -> Any:
        reduced.append(bucket)
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, lambda state, bucket: result(bucket))
    for _ in range(7):
        ddp(torch.ones(1, 2)).sum().backward()
    with ddp.no_sync():
        ddp(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        ddp(torch.ones(1, 2))
    assert len(reduced) == 2
    assert [(each.name, each.value) for each in noted] == [("accumulation", "3")]
    assert ddp.module.weight.grad[0, 0].item() == 8.0


def test_apex_takes_the_place_of_torch(
    group: None, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Apex(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, given: torch.Tensor) -> Any:
            return self.module(given)

    apex = SimpleNamespace(DistributedDataParallel=Apex)
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace(parallel=apex))
    monkeypatch.setitem(sys.modules, "apex.parallel", apex)
    ddp = ddp_with(monkeypatch, "ddp=apex")(nn.Linear(2, 2), device_ids=None)
    assert type(ddp) is Apex
    assert ddp(torch.ones(1, 2)).shape == (1, 2)
    assert noted[0].value == "apex"


def test_arguments_of_loaders(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    loader_class: Any = type("DataLoader", (DataLoader,), {})
    monkeypatch.setenv(overrides.VARIABLE, "batch_size=3 num_workers=0")
    hooks.install_loader(SimpleNamespace(DataLoader=loader_class))  # type: ignore[arg-type]
    data = TensorDataset(torch.arange(12))
    loader = loader_class(data, 4, num_workers=2, persistent_workers=True)
    assert [len(batch) for (batch,) in loader] == [3, 3, 3, 3]
    assert (loader.num_workers, loader.persistent_workers) == (0, False)
    own = loader_class(data, batch_sampler=[[0, 1], [2, 3]])
    assert [batch.tolist() for (batch,) in own] == [[0, 1], [2, 3]]


def test_without_the_variable_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp_class = ddp_with(monkeypatch, "")
    assert "__init__" not in vars(ddp_class)


# -- real runs


@pytest.mark.slow
def test_one_and_two_ranks(doctor: Doctor) -> None:
    result = doctor.cli(
        "scale", "--nproc", "1,2", "--repeat", "1", "--json", "--run-dir", "runs", "--plot",
        "a.svg", "--try", "bucket_cap_mb=1", TRAIN, "--steps", "12",
    )  # fmt: skip
    assert result.status == 0, result.stderr
    one, two, tried = json.loads(result.stdout)["rows"]
    assert (one["ranks"], two["ranks"], tried["variant"]) == (1, 2, "bucket_cap_mb=1")
    for row in (one, two, tried):
        measured = row["median"]
        assert (measured["steps"], measured["samples"]) == (7, 16)
        parts = ("data", "forward", "backward", "optimizer")
        assert all(0 < measured[name] < measured["step"] for name in parts)
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
