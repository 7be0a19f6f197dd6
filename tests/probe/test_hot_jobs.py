"""Jobs with the compiled core: what they record is the same without it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.probe.runtime import hot
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.ring import read_ring
from tests.conftest import Doctor

pytestmark = pytest.mark.skipif(hot.core is None, reason="the core is not compiled here")


def test_a_core_of_another_version_is_not_taken() -> None:
    code = """
        import sys, types
        sys.modules["ddpdoctor.probe.runtime._hot"] = types.SimpleNamespace(CONTRACT=0)
        from ddpdoctor.probe.runtime import hot
        print(hot.core, hot.Phases.__module__)
    """
    code = "\n".join(line.strip() for line in code.strip().splitlines())
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["None", "ddpdoctor.probe.runtime.phases"]


JOB = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.set_num_threads(1)
ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(400, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4)
loss_sum = torch.zeros(1)
for epoch in range(8):
    for number, (batch,) in enumerate(loader):
        optimizer.zero_grad()
        if number % 50 == 7:
            with ddp.no_sync():
                ddp(batch).square().mean().backward()
        loss = ddp(batch).square().mean()
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()
        dist.all_reduce(loss_sum, async_op=number % 9 == 0) if number % 3 else dist.barrier()
    ddp.eval()
    with torch.no_grad():
        ddp(batch)
    ddp.train()
dist.destroy_process_group()
"""


def recorded(doctor: Doctor, script: Path, **environment: str) -> Any:
    """What two ranks wrote of the job: facts alone, no times, for each of them."""
    result = doctor.run("--nproc-per-node", "2", str(script), env=environment)
    result.check_success()
    run = RunReader(result.run_dir).snapshot()
    found = []
    for each in run.last:
        assert not each.records.of(FaultRecord)
        ring = read_ring(str(result.run_dir / f"rank-{each.rank:04d}.r0.collectives"))
        status = each.status
        assert status is not None
        found.append(
            {
                "steps": [(step.step, step.backwards, step.epoch) for step in each.steps],
                "calls": ring.calls,
                "last": [
                    (c.order, c.sequence, c.name, c.group, c.dtype, c.reduce, c.shape, c.numel,
                     c.root, c.asynchronous, c.site, c.callers, c.ended > 0)
                    for c in ring.collectives
                ],
                "page": (status.step, status.armed, status.reduced, status.epoch, status.phase),
            }
        )  # fmt: skip
    return found


@pytest.mark.slow
def test_what_a_job_records_is_the_same_without_it(doctor: Doctor) -> None:
    script = doctor.write("train.py", JOB)
    compiled = recorded(doctor, script)
    python = recorded(doctor, script, DDPDOCTOR_PURE_PYTHON="1")
    for ours, theirs in zip(compiled, python, strict=True):
        for name, facts in theirs.items():
            assert ours[name] == facts, name
    assert compiled[0]["page"][0] == 800
    assert len({each[0] for each in compiled[0]["steps"]}) == 800


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps(doctor: Doctor) -> None:
    script = doctor.write(
        "train.py",
        """
        import resource, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        batch = torch.randn(4, 4)
        def most(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for step in range(6000):
            ddp(batch).sum().backward()
            optimizer.step()
            dist.all_reduce(batch[0])
            if step == 2000:
                before = most()
        print("grew by", most() - before)
        dist.destroy_process_group()
        """,
    )
    result = doctor.run("--nproc-per-node", "1", str(script))
    result.check_success()
    found = re.search(r"grew by (\d+)", result.stdout)
    assert found is not None
    # A reference that is kept in each step would be 64 bytes and more, of several kinds.
    assert int(found[1]) < 1024, "KiB in 4,000 steps"
