"""What only a GPU can show. Each test says why it was skipped where there is none."""

from __future__ import annotations

import json
import os

from ddpdoctor.run.records.model import DdpRecord, NonfiniteRecord
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.system.gpu_poll import Poller
from ddpdoctor.system.nvml import visible
from ddpdoctor.top.frame_sources import open_source
from ddpdoctor.top.frames import WANT_ALL
from tests.conftest import ROOT, Doctor, Result
from tests.gpu.machine import needs_gpu, needs_nccl

pytestmark = [needs_gpu, needs_nccl]

RESNET = str(ROOT / "sample_jobs" / "resnet50_synthetic.py")
CIFAR = str(ROOT / "sample_jobs" / "cifar10.py")
SHORT = ("--batch-size", "16", "--image-size", "64", "--iterations", "40")


def check(result: Result, ranks: int, backend: str) -> None:
    """The job succeeded, every rank was watched on its device, and no finding was made."""
    result.check_success()
    assert [code for code in result.codes if code != "DDP906"] == []
    run = result.run
    assert len(run.ranks) == ranks
    for rank in run.ranks:
        assert rank.opened.backend.startswith(backend)
        ddp = rank.records.of(DdpRecord)[0]
        assert ddp.device.startswith("cuda")
        assert ddp.device_name
        steps = rank.steps
        assert len(steps) >= 40
        # From events: every phase took some time, and the parts make the total.
        for step in steps[5:]:
            parts = step.data + step.forward + step.backward + step.optimizer
            assert parts + step.other + step.wait == step.total
            assert min(step.forward, step.backward, step.optimizer) > 0
            assert step.loss is not None
        assert not list(rank.records.of(FaultRecord))
        status = rank.status
        assert status is not None and status.allocated and status.reserved and status.peak
        assert status.allocated <= min(status.reserved, status.peak)
    told = [json.loads(path.read_text()) for path in result.run_dir.glob("gpus-*.json")]
    (node,) = told
    assert node["nvml"] == ""
    # What the monitor joins by: the UUID that a rank reports, and NVML's.
    for row in open_source(str(result.run_dir)).read(WANT_ALL).ranks:
        assert row.gpu is not None and row.gpu.memory_total


def test_one_rank_on_nccl(doctor: Doctor) -> None:
    check(doctor.run("--nproc-per-node", "1", RESNET, *SHORT), 1, "nccl")


def test_two_ranks_on_one_gpu_by_gloo(doctor: Doctor) -> None:
    check(doctor.run("--nproc-per-node", "2", RESNET, "--backend", "gloo", *SHORT), 2, "gloo")


def test_numbers_of_a_gpu() -> None:
    poller = Poller()
    told = poller.read()
    poller.close()
    assert told["nvml"] == "" and told["gpus"]
    for each in told["gpus"]:
        assert each["uuid"].startswith(("GPU-", "MIG-"))
        assert 0 < each["memory_used"] < each["memory_total"]
        if not each.get("mig"):
            assert 0 <= each["utilization"] <= 1
            assert 0 < each["power"] < 2000 and 1e8 < each["clock"] < 1e10


def test_cifar_learns(doctor: Doctor) -> None:
    check(doctor.run("--nproc-per-node", "1", CIFAR), 1, "nccl")


def test_without_nproc_there_is_one_rank_per_gpu(doctor: Doctor) -> None:
    result = doctor.run(RESNET, "--backend", "gloo", *SHORT)
    count = visible(os.environ)
    assert f"one per visible GPU ({count})" in result.ours
    assert len(result.run.ranks) == count


def test_of_a_loss_the_operation_and_the_module_are_told(doctor: Doctor) -> None:
    job = str(ROOT / "tests" / "jobs" / "entropy_on_gpu.py")
    result = doctor.run("--nproc-per-node", "1", "--overhead-budget", "50", job)
    assert result.codes == ["DDP706"]
    told = result.run.ranks[0].records.of(NonfiniteRecord)[0]
    assert told.step == 12
    source = told.origin and (told.origin.infinite or told.origin)
    assert source is not None
    assert (source.operations, source.module) == (("log",), "scores")
