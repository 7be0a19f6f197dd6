"""Losses, random state and output are those of the job without ddpdoctor."""

from __future__ import annotations

import re

import pytest

from ddpdoctor.run.records.training import ProfileRecord
from tests.conftest import JOBS, ROOT, Doctor, Result

SAMPLES = ROOT / "sample_jobs"


# -- the same numbers


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_losses_and_random_state_are_the_same_bit_for_bit(doctor: Doctor, workers: int) -> None:
    words = [
        "--nproc-per-node=2",
        str(JOBS / "train.py"),
        "--print-losses",
        "--steps=6",
        f"--workers={workers}",
    ]
    bare, watched = doctor.torchrun(*words), doctor.run(*words)
    bare.check_success()
    watched.check_success()
    # The ranks print their last lines in any order.
    assert sorted(own_lines(watched)) == sorted(own_lines(bare))
    assert len(own_lines(bare)) == 6 + 2
    assert [len(rank.steps) for rank in watched.run.last] == [6, 6]


@pytest.mark.slow
def test_losses_are_the_same_where_stacks_are_sampled(doctor: Doctor) -> None:
    script = doctor.write(
        "slow_rank.py",
        """
        import sys
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        def clean(batch):
            return sorted(batch.flatten().tolist())

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        torch.manual_seed(rank)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.ReLU()))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for _ in range(150):
            batch = torch.randn(256, 64)
            if rank == 1:
                clean(batch), clean(batch), clean(batch)
            loss = ddp(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sys.stdout.write(f"{rank} {loss.item():.17g}\\n")
        sys.stdout.write(f"{rank} {torch.initial_seed()} {torch.get_rng_state().sum()}\\n")
        sys.stdout.flush()
        """,
    )
    bare = doctor.torchrun("--nproc-per-node=2", str(script))
    watched = doctor.run("--nproc-per-node=2", str(script))
    bare.check_success()
    watched.check_success()
    assert len(bare.stdout.splitlines()) == 2 * 151
    assert sorted(watched.stdout.splitlines()) == sorted(bare.stdout.splitlines())
    for rank in watched.run.last:
        (profile,) = rank.records.of(ProfileRecord)
        assert profile.samples > 12


def own_lines(result: Result) -> list[str]:
    """What the job printed; gloo of torch 2.8 prints between it, both ranks at once."""
    lines = result.stdout.splitlines()
    if "[Gloo]" not in result.stdout:
        return lines
    return [line for line in lines if re.fullmatch(r"\d+\.\d{4,}|rng \d -?\d+", line)]


def same_text(text: str) -> str:
    """An output without the durations and rates in it."""
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)? (ms|s|images/s)\b", r"# \3", text)
    return re.sub(r"time \d+\.\d+|\d+:\d\d", "time #", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            (
                "resnet50_synthetic.py",
                "--iterations=3",
                "--warmup=1",
                "--batch-size=2",
                "--image-size=33",
            ),
            marks=pytest.mark.slow,
        ),
        (
            "cifar10.py",
            "--train-size=128",
            "--test-size=32",
            "--batch-size=32",
            "--epochs=2",
            "--workers=1",
        ),
    ],
    ids=["resnet50", "cifar10"],
)
def test_sample_jobs_print_the_same(doctor: Doctor, words: tuple[str, ...]) -> None:
    job = ["--nproc-per-node=2", str(SAMPLES / words[0]), *words[1:]]
    bare, watched = doctor.torchrun(*job), doctor.run(*job)
    bare.check_success()
    watched.check_success()
    losses = re.findall(r" loss (\S+)", bare.stdout)
    assert len(losses) >= 2
    assert re.findall(r" loss (\S+)", watched.stdout) == losses
    assert same_text(watched.stdout) == same_text(bare.stdout)
    steps = [len(rank.steps) for rank in watched.run.last]
    assert steps[0] == steps[1] > 0
    assert watched.codes == []


LOOPS = [
    "accumulation_with_no_sync",
    "two_optimizers",
    "lbfgs",
    "reentrant_checkpoint",
    "amp",
    "evaluation_with_ddp",
]


@pytest.mark.slow
def test_loops_of_many_kinds_print_the_same(doctor: Doctor) -> None:
    words = ["--nproc-per-node=1", str(JOBS / "loops.py"), str(doctor.directory), *LOOPS]
    bare, watched = doctor.torchrun(*words), doctor.run(*words)
    bare.check_success()
    watched.check_success()
    assert watched.stdout == bare.stdout
    assert len(bare.stdout.splitlines()) == len(LOOPS) + 1
