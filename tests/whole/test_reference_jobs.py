"""The reference jobs are healthy under ``ddpdoctor run``, under torchrun and alone."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path

import pytest

from tests.conftest import Doctor, Result
from tests.whole.test_sample_jobs import (
    JOBS,
    Done,
    error_of_single,
    losses_of,
    run_alone,
    run_command,
    run_ranks,
    summary_of,
)

MNIST, STN = "mnist_tcp.py", "stn_spawn.py"
FLOWERS, IMAGENET = "flowers_resnet34.py", "imagenet_resnet.py"
PIPELINE, RESNET = "hybrid_pipeline.py", "resnet50_synthetic.py"
GPT, FSDP = "transformer_lm.py", "fsdp2_lm.py"

SMALL = {
    MNIST: ("--train-size", "600", "--test-size", "101", "--epochs", "1"),
    STN: ("--train-size", "256", "--test-size", "51", "--epochs", "1"),
    FLOWERS: ("--train-size", "24", "--test-size", "11", "--epochs", "1", "--batch-size", "4"),
    IMAGENET: ("--train-size", "24", "--test-size", "11", "--epochs", "1", "--batch-size", "4"),
    PIPELINE: ("--arch", "resnet18", "--steps", "3"),
    GPT: ("--text-size", "9000", "--epochs", "1"),
    FSDP: ("--text-size", "9000", "--epochs", "1"),
}
"""Options with which a job takes a few seconds."""

ACCURACY = r"[01]\.\d{4}"
SUMMARIES = {
    MNIST: rf"summary: ranks \d, 1 epochs in \S+ s, \d+ digits/s, test accuracy {ACCURACY}",
    STN: rf"summary: ranks \d, 1 epochs, test accuracy {ACCURACY}",
    FLOWERS: rf"summary: 1 epochs, test accuracy {ACCURACY}",
    IMAGENET: rf"summary: top-1 {ACCURACY} \(\d+ of 11 pictures\), top-5 {ACCURACY}, best top-1 .*",
    PIPELINE: r"summary: \d replicas of [12] stages, bubble \d+% \(2?0% .*\), \S+ images/s",
    GPT: r"summary: 1 epochs, validation loss \d\.\d+ a byte, perplexity \d+\.\d+",
    FSDP: r"summary: 1 epochs, validation loss \d\.\d+",
}


def check_healthy(done: Result, job: str, ranks: int = 2) -> None:
    """The job did its work, and ddpdoctor saw all of it and had nothing to report."""
    done.check_success()
    lines = [line for line in done.stdout.splitlines() if line.startswith("summary: ")]
    assert len(lines) == 1, done.stdout + done.stderr
    assert re.fullmatch(SUMMARIES[job], lines[0])
    assert not re.findall(r"^ddpdoctor: (?:error|warning) .*", done.stderr, re.M), done.stderr
    assert f"ddpdoctor: {ranks} ranks, " in done.stderr
    assert all(rank.steps for rank in done.run.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("job", [MNIST, PIPELINE, FLOWERS, IMAGENET, GPT, FSDP])
def test_ddpdoctor_finds_nothing(doctor: Doctor, job: str) -> None:
    done = doctor.run("--nproc-per-node", "2", "--", str(JOBS / job), *SMALL[job])
    check_healthy(done, job)
    assert all(step.forward for rank in done.run.ranks for step in rank.steps)
    stages = [rank.status.stage for rank in done.run.ranks if rank.status is not None]
    assert stages == (["0", "1"] if job == PIPELINE else ["", ""])


@pytest.mark.slow
def test_ddpdoctor_finds_nothing_where_the_script_spawns_its_ranks(doctor: Doctor) -> None:
    done = doctor.run("--", sys.executable, str(JOBS / STN), "--ranks", "2", *SMALL[STN])
    check_healthy(done, STN)


@pytest.mark.slow
@pytest.mark.parametrize("job", sorted(SMALL))
def test_torchrun_runs_it(tmp_path: Path, job: str) -> None:
    assert re.fullmatch(SUMMARIES[job], summary_of(run_ranks(tmp_path, 2, job, *SMALL[job])))


@pytest.mark.slow
@pytest.mark.parametrize("job", sorted({*SMALL} - {STN}))
def test_it_runs_alone(tmp_path: Path, job: str) -> None:
    done = run_alone(tmp_path, job, *SMALL[job])
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(SUMMARIES[job], summary_of(done))


@pytest.mark.slow
def test_stn_on_one_rank_and_with_unused_parameters(doctor: Doctor, tmp_path: Path) -> None:
    assert "ranks 1," in summary_of(run_alone(tmp_path, STN, "--ranks", "1", *SMALL[STN]))
    options = [*SMALL[STN], "--epochs", "2", "--straight-epochs", "1", "--find-unused-parameters"]
    done = doctor.run("--", sys.executable, str(JOBS / STN), *options)
    done.check_success()
    assert "epoch 1/2 straight loss" in done.stdout
    assert not re.findall(r"^ddpdoctor: (?:error|warning) .*", done.stderr, re.M), done.stderr


REFUSED = [
    (MNIST, ["--rank", "1"], "--rank and --world-size belong together"),
    (MNIST, ["--rank", "0", "--world-size", "2"], "needs --init-method tcp://HOST:PORT"),
    (MNIST, ["--rank", "2", "--world-size", "2"], "the ranks of 2 are numbered from 0"),
    (MNIST, ["--init-method", "tcp://a:1"], "--init-method needs --rank and --world-size"),
    (MNIST, ["--data", "absent"], "the four idx files of MNIST"),
    (STN, ["--straight-epochs", "1"], "add --find-unused-parameters"),
    (STN, ["--ranks", "0"], "--ranks: 0 is not above 0"),
    (FLOWERS, ["--sync-bn"], "torch has no SyncBatchNorm for CPUs"),
    (FLOWERS, ["--train-size", "5"], "fewer than one batch of 8"),
    (FLOWERS, ["--weights", "absent.pth"], "absent.pth: no weights of a ResNet-34"),
    (FLOWERS, ["--freeze", "5"], "argument --freeze: invalid choice"),
    (IMAGENET, ["--resume"], "--resume needs --checkpoint"),
    (IMAGENET, ["--checkpoint", "absent/x.pt"], "its folder does not exist"),
    (IMAGENET, ["--checkpoint", "x.pt", "--resume"], "x.pt: No such file or directory"),
    (
        PIPELINE,
        ["--arch", "resnet18", "--split", "15"],
        "--split 15: auto, or 1 to 14 of 15 layers",
    ),
    (PIPELINE, ["WORLD_SIZE=3"], "3 ranks are no whole number of replicas with 2 stages"),
    (MNIST, ["LOCAL_WORLD_SIZE=2", "--backend", "nccl"], "a GPU for each of 2 local ranks"),
    (RESNET, ["--backend", "nccl"], "--backend nccl needs a GPU, and 0 are visible"),
    (RESNET, ["WORLD_SIZE=2", "--single"], "--single trains in one process"),
    (GPT, ["--heads", "3"], "--channels 64 cannot be divided among 3 --heads"),
    (GPT, ["--text-size", "100"], "100 bytes are too few for pieces of 64"),
    (GPT, ["--text", "absent.txt"], "No such file or directory: 'absent.txt'"),
    (FSDP, ["--checkpoint", "absent", "--resume"], "absent: no checkpoint"),
    (RESNET, ["--dataparallel"], "--dataparallel needs a GPU"),
    (RESNET, ["--single", "--backend", "gloo"], "--single has no DDP"),
    (RESNET, ["--single", "--dataparallel"], "not allowed with argument --single"),
]

REFUSING = """
import contextlib, io, json, os, runpy, sys
folder, cases = json.loads(sys.argv[1])
sys.path.insert(0, folder)
refusals = []
for job, options in cases:
    variables = dict(each.split("=") for each in options if each[0] != "-" and "=" in each)
    os.environ.update(variables)
    sys.argv = [job, *options[len(variables):]]
    said = io.StringIO()
    status = None
    with contextlib.redirect_stderr(said):
        try:
            runpy.run_path(f"{folder}/{job}", run_name="__main__")
        except SystemExit as end:
            status = end.code
    for name in variables:
        del os.environ[name]
    refusals.append([status, said.getvalue()])
print(json.dumps(refusals))
"""


def test_wrong_options_are_refused_with_one_line_and_status_2(tmp_path: Path) -> None:
    # One process for all, as most of the time goes into importing torch.
    cases = json.dumps([str(JOBS), [case[:2] for case in REFUSED]])
    done = run_command([sys.executable, "-c", REFUSING, cases], tmp_path)
    assert done.returncode == 0, done.stderr
    for (job, options, reason), (status, text) in zip(
        REFUSED, json.loads(done.stdout), strict=True
    ):
        errors = [line for line in text.splitlines() if line.startswith(f"{job}: error: ")]
        assert (status, len(errors)) == (2, 1), (job, options, text)
        assert reason in errors[0], (job, options)


@pytest.mark.slow
def test_an_odd_number_of_ranks_is_refused_under_a_launcher(doctor: Doctor) -> None:
    done = doctor.run("--nproc-per-node", "3", "--", str(JOBS / PIPELINE), *SMALL[PIPELINE])
    assert done.status != 0
    assert not done.stdout
    assert "3 ranks are no whole number of replicas with 2 stages" in done.stderr
    # torchrun's own, about ranks that failed.
    assert done.stderr.count("Traceback") == 1


def hidden(folder: Path, module: str, job: str, *options: str) -> Done:
    """Run a job alone as if a module could not be imported."""
    code = (
        f"import sys, runpy; sys.modules[{module!r}] = None; sys.path.insert(0, {str(JOBS)!r})\n"
        f"sys.argv = [{job!r}, *{list(options)!r}]\n"
        f"runpy.run_path({str(JOBS / job)!r}, run_name='__main__')\n"
    )
    return run_command([sys.executable, "-c", code], folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "job", "options", "reason"),
    [
        ("torch.distributed.pipelining", PIPELINE, (), "has no torch.distributed.pipelining"),
        ("apex", RESNET, ("--backend", "apex"), "needs NVIDIA Apex"),
    ],
)
def test_what_is_not_installed_is_named_in_one_line(
    tmp_path: Path, module: str, job: str, options: tuple[str, ...], reason: str
) -> None:
    assert reason in error_of_single(hidden(tmp_path, module, job, *options), job)


def write_idx(path: Path, shape: tuple[int, ...], content: bytes) -> None:
    """Write unsigned bytes as an idx file."""
    path.write_bytes(struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + content)


@pytest.mark.slow
def test_mnist_reads_idx_files_and_refuses_half_ones(tmp_path: Path) -> None:
    for part, count in (("train", 40), ("t10k", 21)):
        images = bytes(value % 251 for value in range(count * 784))
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", (count, 28, 28), images)
        labels = bytes(number % 10 for number in range(count))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", (count,), labels)
    done = run_alone(tmp_path, MNIST, "--data", str(tmp_path), "--epochs", "1")
    assert "40 digits for training" in done.stdout
    assert "ranks 1, 1 epochs" in summary_of(done)
    whole = (tmp_path / "t10k-images-idx3-ubyte").read_bytes()
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(whole[:-1])
    error = error_of_single(run_alone(tmp_path, MNIST, "--data", str(tmp_path)), MNIST)
    assert "no complete idx file" in error


def test_flowers_shows_what_the_samplers_do(tmp_path: Path) -> None:
    shown = run_alone(tmp_path, FLOWERS, "--show-sampler").stdout
    assert "rank 0 of 2, 11 samples: [0, 2, 4, 6, 8, 10]" in shown
    assert "rank 1 of 2, 11 samples: [1, 3, 5, 7, 9, 0]" in shown
    assert "batches of 4, drop_last=True: [[1, 3, 5, 7]]" in shown


@pytest.mark.slow
def test_flowers_trains_the_head_on_a_folder_of_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow writes and reads the pictures")
    for name, colour in (("rose", "red"), ("cornflower", "blue")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(12):
            file = tmp_path / "pictures" / name / f"{number}.png"
            image.new("RGB", (40 + number, 50), colour).save(file)
    code = (
        f"import sys, torch; sys.path.insert(0, {str(JOBS)!r}); from models import resnet34\n"
        "names = {'0': 'conv1', '1': 'bn1', '10': 'fc'}\n"
        "names.update({str(n + 3): f'layer{n}' for n in range(1, 5)})\n"
        "state = {}\n"
        "for name, value in resnet34().state_dict().items():\n"
        "    first, _, rest = name.partition('.')\n"
        "    state[names[first] + '.' + rest.replace('shortcut', 'downsample')] = value\n"
        "torch.save(state, 'weights.pth')\n"
    )
    assert run_command([sys.executable, "-c", code], tmp_path).returncode == 0
    options = ("--data", "pictures", "--weights", "weights.pth", "--freeze", "4")
    more = ("--batch-size", "4", "--epochs", "1", "--workers", "1")
    done = run_ranks(tmp_path, 2, FLOWERS, *options, *more)
    assert re.fullmatch(SUMMARIES[FLOWERS], summary_of(done))
    # Two classes of 512 weights and a bias each.
    assert "2 classes, 19 pictures for training, 5 for testing, 1,026 parameters" in done.stdout


KEEPING = """
import runpy, shutil, sys
sys.path.insert(0, sys.argv.pop(1))
import job_setup
write = job_setup.write_checkpoint
def write_and_keep(path, state):
    write(path, state)
    assert not any(name.startswith("module.") for name in state["model"])
    shutil.copy(path, f"epoch{state['epoch']}.pt")
job_setup.write_checkpoint = write_and_keep
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a job that keeps the checkpoint of every epoch."""


@pytest.mark.slow
@pytest.mark.parametrize("job", [IMAGENET, GPT])
def test_it_resumes_exactly_where_it_stopped(tmp_path: Path, job: str) -> None:
    options = [*SMALL[job], "--epochs", "2"]
    command = [sys.executable, "-c", KEEPING, str(JOBS), str(JOBS / job), *options]
    whole = run_command([*command, "--checkpoint", "state.pt"], tmp_path)
    summary_of(whole)
    resumed = run_alone(tmp_path, job, *options, "--checkpoint", "epoch1.pt", "--resume")
    assert "resumed from epoch1.pt after epoch 1" in resumed.stdout
    assert summary_of(resumed) == summary_of(whole)
    last = [re.findall(r"^epoch 2/2 .*", each.stdout, re.M) for each in (whole, resumed)]
    assert len(last[0]) == 1
    assert last[0] == last[1]


@pytest.mark.slow
def test_imagenet_tests_every_picture_once_on_any_number_of_ranks(tmp_path: Path) -> None:
    options = (*SMALL[IMAGENET], "--checkpoint", "state.pt")
    first = summary_of(run_ranks(tmp_path, 2, IMAGENET, *options))
    # 11 pictures are divided among neither 2 nor 3 ranks.
    assert summary_of(run_ranks(tmp_path, 3, IMAGENET, *options, "--resume", "--evaluate")) == first


@pytest.mark.slow
def test_fsdp2_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    options = (*SMALL[FSDP], "--checkpoint", "states")
    first = run_ranks(tmp_path, 2, FSDP, *options)
    summary_of(first)
    assert "68,480 of them on rank 0" in first.stdout
    again = run_alone(tmp_path, FSDP, *options, "--resume")
    assert "resumed from states/epoch-000001 after epoch 1" in again.stdout
    losses = [re.findall(r"summary: .* loss (\S+)", each.stdout) for each in (first, again)]
    assert float(losses[0][0]) == pytest.approx(float(losses[1][0]), abs=0.05)


WHOLE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from hybrid_pipeline import CLASSES, GeneratedImages, cuttable_layers
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
torch.manual_seed(0)
model = nn.Sequential(*cuttable_layers("resnet18"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
pictures = GeneratedImages(24, CLASSES, 32, 0, augment=False)
for images, labels in DataLoader(pictures, 8, sampler=DistributedSampler(pictures, 1, 0, seed=0)):
    optimizer.zero_grad()
    total = 0.0
    for start in range(0, 8, 2):
        logits = model(images[start : start + 2])
        loss = nn.functional.cross_entropy(logits, labels[start : start + 2]) / 4
        loss.backward()
        total += loss.item()
    optimizer.step()
    print(f"step loss {total:.4f}")
"""


@pytest.mark.slow
def test_the_pipeline_trains_as_the_whole_network_would(tmp_path: Path) -> None:
    whole = run_command([sys.executable, "-c", WHOLE, str(JOBS)], tmp_path)
    halves = run_ranks(tmp_path, 2, PIPELINE, *SMALL[PIPELINE], "--split", "9")
    summary_of(halves)
    expected = [float(loss) for loss in losses_of(whole)]
    assert len(expected) == 3
    assert [float(loss) for loss in losses_of(halves)] == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
def test_four_ranks_are_two_replicas(doctor: Doctor) -> None:
    done = doctor.run("--nproc-per-node", "4", "--", str(JOBS / PIPELINE), *SMALL[PIPELINE])
    check_healthy(done, PIPELINE, ranks=4)
    assert re.search(r"^layer +\d+ BasicBlock .* ms  <- cut$", done.stdout, re.M)
    busy = re.findall(r"^replica (\d) stage (\d) \(rank (\d)\): busy \d+%", done.stdout, re.M)
    assert busy == [("0", "0", "0"), ("0", "1", "1"), ("1", "0", "2"), ("1", "1", "3")]


@pytest.mark.slow
def test_resnet50_without_ddp_is_a_baseline(doctor: Doctor, tmp_path: Path) -> None:
    options = ("--single", "--iterations", "3", "--batch-size", "2", "--image-size", "33")
    assert "iterations after" in summary_of(run_alone(tmp_path, RESNET, *options))
    done = doctor.run("--nproc-per-node", "1", "--", str(JOBS / RESNET), *options)
    done.check_success()
    assert not re.findall(r"^ddpdoctor: (?:error|warning) .*", done.stderr, re.M), done.stderr
    refused = run_ranks(tmp_path, 2, RESNET, *options)
    assert "--single trains in one process" in refused.stderr
