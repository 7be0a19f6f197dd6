"""``ddpdoctor parity`` and ``replay`` from their command lines, with real ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import JOBS, Doctor
from tests.support.schemas import check_schema

JOB = str(JOBS / "parity.py")


def compared(doctor: Doctor, *words: str) -> Any:
    result = doctor.cli("parity", "--json", "--run-dir", "sizes", "--replay", *words)
    document = json.loads(result.stdout)
    check_schema("parity", document)
    assert document["failed"] == [], result.stderr
    return document, result.status


def codes(document: Any, least: str = "warning") -> set[str]:
    wanted = ("warning", "error") if least == "warning" else ("info",)
    return {each["code"] for each in document["findings"] if each["severity"] in wanted}


@pytest.mark.slow
def test_the_same_training(doctor: Doctor) -> None:
    document, status = compared(doctor, "--nproc", "1,2,4", "--", JOB, "whole")
    assert (codes(document), codes(document, "info"), status) == (set(), set(), 0)
    assert document["verdict"] == "the same training, 4 times the batch"
    assert [each["batch"] for each in document["sizes"]] == [4, 8, 16]
    assert [each["epoch"]["samples"] for each in document["sizes"]] == [320, 320, 320]
    # The head, two rows and two of the replay, the verdict, and where the runs are.
    again = doctor.cli("parity", *(each["directory"] for each in document["sizes"]))
    assert len(again.stdout.splitlines()) == 7, again.stdout
    for each in document["sizes"]:
        assert each["gradient"]["why_not"] == "" and each["gradient"]["different"] == []
        assert each["gradient"]["parameters"] == 3
        assert (each["gradient"]["whole_by"], each["gradient"]["whole"]) == ("loss", 0.0)
        assert each["gradient"]["whole_scale"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "code"), [("own", "DDP337"), ("all", "DDP102"), ("hook", "DDP338")]
)
def test_what_differs_is_named(doctor: Doctor, word: str, code: str) -> None:
    document, status = compared(doctor, "--nproc", "1,2", "--", JOB, word)
    assert code in codes(document) and status == 1
    assert document["verdict"] == "2 ranks train differently from 1, see above"
    gradient = document["sizes"][1]["gradient"]
    assert gradient["scale"] == (pytest.approx(2.0, rel=0.01) if word == "hook" else None)
    if word == "own":
        assert gradient["whole"] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "expected"),
    [("dropped", {"DDP349"}), ("hand", {"DDP349"}), ("shard", {"DDP106"}), ("all", set())],
)
def test_evaluations(doctor: Doctor, word: str, expected: set[str]) -> None:
    document, _ = compared(doctor, "--nproc", "1,2", "--", str(JOBS / "parity_evaluation.py"), word)
    assert codes(document) == expected


LOSSES = {
    **dict.fromkeys(("module", "smoothed", "two", "custom", "sizes"), ("loss", 1.0, "")),
    "returned": ("inputs", 1.0, ""),
    "sum": ("loss", 2.0, ""),
    "numbers": ("predictions", 1.0, "other numbers"),
    "noise": ("predictions", 1.0, "another gradient"),
}


@pytest.mark.slow
@pytest.mark.parametrize("word", LOSSES)
def test_losses(doctor: Doctor, word: str) -> None:
    document, _ = compared(
        doctor, "--nproc", "1,2", "--steps", "9", "--", str(JOBS / "parity_losses.py"), word
    )
    by, scale, why = LOSSES[word]
    gradient = document["sizes"][1]["gradient"]
    assert (gradient["why_not"], gradient["different"]) == ("", [])
    assert gradient["whole_by"] == by and why in gradient["whole_why"], gradient
    if not why:
        assert gradient["whole_why"] == "" and gradient["whole"] == 0.0
        assert gradient["whole_scale"] == pytest.approx(scale, rel=1e-3)
    assert not codes(document)


@pytest.mark.slow
def test_seeds_are_a_band(doctor: Doctor) -> None:
    document, _ = compared(doctor, "--nproc", "1,2", "--seeds", "2", "--", JOB, "whole")
    band = document["curves"]["band"]
    assert band["seeds"] == 2 and band["low"] != band["high"]
    assert document["remarks"][0].startswith("the loss of 2 ranks after")
    assert len(document["sizes"]) == 2


@pytest.mark.slow
def test_runs_are_compared_again(doctor: Doctor) -> None:
    document, _ = compared(doctor, "--nproc", "1,2", "--steps", "20", "--", JOB, "own")
    again = doctor.cli("parity", *(each["directory"] for each in document["sizes"]))
    assert "samples per optimizer step" in again.stdout and "DDP337" in again.stdout
    assert again.status == 1


@pytest.mark.slow
def test_a_failed_step_is_computed_alone(doctor: Doctor) -> None:
    run = doctor.run("--capsule", "--nproc-per-node", "2", "--no-vscode", JOB, "fails")
    assert run.status == 1 and "rank 1 kept step 7: ddpdoctor replay" in run.stderr
    again = doctor.cli("replay", str(run.run_dir), "--rank", "1")
    assert again.status == 1
    assert "step 7 of rank 1 of 2, which ended with IndexError" in again.stdout
    assert "IndexError: index out of range in self" in again.stderr
    other = doctor.cli("replay", str(run.run_dir), "--rank", "0")
    assert other.status == 0 and "float32 [4, 12, 50]" in other.stdout


MODELS = """
from torch import nn

class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, 1)

    def forward(self, inputs):
        return self.inner(inputs)
"""
TRAIN = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from models import Scaled

WIDTH = 3

class Net(Scaled):
    def __init__(self):
        super().__init__(WIDTH)

dist.init_process_group("gloo")
last = dist.get_rank() == dist.get_world_size() - 1
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    bad = sys.argv[1] if last and step == 4 else ""
    inputs = torch.randn(5, WIDTH + (bad == "shape"))
    outputs = model(inputs).exp()
    loss = (outputs if bad != "nan" else outputs - 100).log().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "head", "line"),
    [
        ("nan", "which ended with a loss of nan: Net, 1 forward", "the outputs are finite, the"),
        ("shape", "which ended with RuntimeError: mat1 and mat2 shapes", "models.py"),
    ],
)
def test_a_step_of_four_ranks_on_another_machine(
    doctor: Doctor, tmp_path: Path, word: str, head: str, line: str
) -> None:
    job, laptop = tmp_path / "job", tmp_path / "laptop"
    for folder in (job, laptop):
        folder.mkdir()
        (folder / "models.py").write_text(MODELS)
        (folder / "train.py").write_text(TRAIN)
    script = str(job / "train.py")
    run = doctor.run("--capsule", "--nproc-per-node", "4", "--no-vscode", script, word)
    assert "rank 3 kept step 4: ddpdoctor replay" in run.stderr, run.stderr
    shutil.copy(run.run_dir / "capsule-0003.pickle", laptop)
    shutil.rmtree(job)
    shutil.rmtree(run.run_dir)
    # As the installed program, which does not look for modules in the working directory.
    start = "import sys; sys.path.remove(''); from ddpdoctor.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "replay", ".", "--rank", "3"]
    again = subprocess.run(command, cwd=laptop, capture_output=True, text=True)
    assert f"step 4 of rank 3 of 4, {head}" in again.stdout, again
    assert line in again.stdout + again.stderr, again
    assert again.returncode == (word == "shape")
    # Damage is an error of one line, whatever is damaged.
    whole = (laptop / "capsule-0003.pickle").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-200] + bytes(200), b""):
        (laptop / "capsule-0003.pickle").write_bytes(damaged)
        again = subprocess.run(command, cwd=laptop, capture_output=True, text=True)
        assert again.returncode == 2 and "cannot be read here" in again.stderr, again
        assert "Traceback" not in again.stderr, again


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parity"], "no script to run"),
        (["parity", "--nproc", "2", JOB], "one size alone cannot be compared"),
        (["parity", "--nproc", "1,2", "nothere.py"], "nothere.py: no such file"),
        (["parity", "--nproc", "1,2", "--", "bash", "x.sh"], "starts the ranks itself"),
        (["replay"], "name one run directory"),
        (["replay", "nothere"], "no run named nothere"),
        (["replay", "."], ". is not a run directory"),
    ],
)
def test_bad_input(doctor: Doctor, words: list[str], message: str) -> None:
    result = doctor.cli(*words)
    assert result.status == 2 and message in result.stderr, result.stderr
