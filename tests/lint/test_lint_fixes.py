"""``ddpdoctor lint --fix``: what has one safe answer is mended, and nothing else changes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ddpdoctor.commands import lint
from ddpdoctor.lint.fixes import FIXES, Edit, edited
from tests.conftest import ROOT, Doctor
from tests.lint.test_lint_rules import CASES, expected

JOB = """\
import argparse  # the options
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)  # filled by whom?
args = parser.parse_args()


def main(data, model, optimizer):
    torch.cuda.set_device(args.local_rank)
    model = DDP(model)
    model.load_state_dict(torch.load("first.pt"))
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data,  # all of it
        batch_size=8,
        shuffle=True,
    )
    for epoch in range(10):
        # one epoch
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    torch.save(
        model.state_dict(),
        "last.pt",
    )


if __name__ == "__main__":
    main(torch.ones(8), torch.nn.Linear(1, 1), None)
"""

MENDED = """\
import argparse  # the options
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument(OPTIONS)  # filled by whom?
args = parser.parse_args()


def main(data, model, optimizer):
    torch.cuda.set_device(args.local_rank)
    model = DDP(model)
    model.load_state_dict(torch.load("first.pt", map_location="cpu"))
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data,  # all of it
        batch_size=8,
        sampler=sampler,
    )
    for epoch in range(10):
        # one epoch
        sampler.set_epoch(epoch)
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(
            model.state_dict(),
            "last.pt",
        )


if __name__ == "__main__":
    main(torch.ones(8), torch.nn.Linear(1, 1), None)
""".replace(
    "OPTIONS",
    '"--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0))',
)


def test_a_job_is_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(JOB)
    path.chmod(0o755)
    assert lint.main(["--fix", str(path)]) == 0
    assert path.read_text() == MENDED
    assert path.stat().st_mode & 0o777 == 0o755
    assert capsys.readouterr().out == "no problems in 1 file\n"


def test_line_ends_stay(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(JOB.replace("\n", "\r\n").encode())
    lint.main(["--fix", str(path)])
    assert path.read_bytes() == MENDED.replace("\n", "\r\n").encode()


def test_a_diff_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(JOB)
    assert lint.main(["--diff", str(path)]) == 1
    assert path.read_text() == JOB
    assert '+    model.load_state_dict(torch.load("first.pt", map_location="cpu"))' in (
        capsys.readouterr().out
    )
    path.write_text(MENDED)
    assert lint.main(["--diff", str(path)]) == 0


@pytest.mark.parametrize(
    "name", [name for name, code in CASES.items() if {c for _, c in expected(code)} & {*FIXES}]
)
def test_what_is_mended_is_found_no_more(name: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(CASES[name])
    lint.main(["--fix", str(path)])
    after = path.read_text()
    ast.parse(after)
    # A second run changes nothing.
    lint.main(["--fix", str(path)])
    assert path.read_text() == after


@pytest.mark.parametrize("name", [name for name, code in CASES.items() if not expected(code)])
def test_healthy_code_stays(name: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(CASES[name])
    assert lint.main(["--fix", str(path)]) == 0
    assert path.read_text() == CASES[name]


def test_a_folder_may_exist(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = """\
import os
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.Linear(1, 1))
if not os.path.exists("runs"):
    os.makedirs("runs")
print(model)
"""
    path.write_text(text)
    assert lint.main(["--fix", "--severity", "info", "--fail-on", "error", str(path)]) == 0
    assert path.read_text() == text.replace('makedirs("runs")', 'makedirs("runs", exist_ok=True)')


def test_what_was_read_otherwise_is_left(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    data = JOB.encode("utf-16")
    path.write_bytes(data)
    assert lint.main(["--fix", str(path)]) == 1
    assert path.read_bytes() == data


def test_edits_count_bytes() -> None:
    text = "x = f('\u00e4\u00f6', a)\n"
    end = len("x = f('\u00e4\u00f6', a".encode())
    assert edited(text, [Edit((1, end), (1, end), ", b")]) == "x = f('\u00e4\u00f6', a, b)\n"


@pytest.mark.slow
@pytest.mark.parametrize("job", ["ddp103_no_set_epoch", "ddp101_sampler_not_used"])
def test_a_mended_job_trains_without_a_finding(doctor: Doctor, job: str) -> None:
    path = doctor.write("train.py", next(ROOT.glob(f"*/**/sick/{job}.py")).read_text())
    assert lint.main(["--fix", str(path)]) == 0
    result = doctor.run("--nproc-per-node", "2", "--", str(path))
    result.check_success()
    assert result.codes == []
