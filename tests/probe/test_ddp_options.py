"""How DDP was built, and compiled DDP."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import FaultRecord
from tests.conftest import Doctor

OPTIONS = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = [dist.new_group([each]) for each in range(2)][rank]
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, dtype=torch.float64))
    model[0].bias.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    DistributedDataParallel(
        model,
        bucket_cap_mb=7,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        process_group=group,
    )
    DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_how_ddp_was_built_is_recorded(doctor: Doctor) -> None:
    script = doctor.write("options.py", OPTIONS)
    result = doctor.run("--nproc-per-node=2", str(script))
    result.check_success()
    for rank in result.run.last:
        first, second = rank.records.of(DdpRecord)
        assert first.module == "Sequential"
        assert first.device == "cpu"
        assert first.group_ranks == (rank.rank,)
        assert first.bucket_cap_bytes == 7 << 20
        assert first.find_unused_parameters is True
        assert first.parameters == (
            ("0.weight", (5, 3), "float32"),
            ("1.bias", (5,), "float32"),
            ("2.weight", (2, 5), "float64"),
            ("2.bias", (2,), "float64"),
        )
        assert first.buffers == 3
        assert (first.path, first.line) == (str(script), 12)
        assert second.group_ranks == (0, 1)
        assert rank.opened.backend == "gloo"
        assert rank.opened.world_size == 2
        assert rank.opened.versions["torch"].startswith("2")
        assert rank.opened.versions["python"].startswith("3.")
    assert result.codes == []


COMPILED = """
    import sys
    import torch, torch.distributed as dist
    from torch import nn
    from torch._dynamo.utils import counters
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend=backend)
        for _ in range(4):
            optimizer.zero_grad()
            loss = compiled(torch.ones(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            print(backend, repr(loss.item()))
        print("graphs", counters["stats"]["unique_graphs"])
        print("breaks", sum(counters["graph_break"].values()))
        counters.clear()

    @torch.compile(backend="eager", fullgraph=True)
    def reduced(tensor):
        dist.all_reduce(tensor)
        return tensor + 1

    print(reduced(torch.ones(2)), sorted(counters["graph_break"].items()))
    counters.clear()

    @torch.compile(backend="eager")
    def with_barrier(tensor):
        tensor = tensor + 1
        dist.barrier()
        return tensor * 2

    print(with_barrier(torch.ones(2)))
    print("breaks", sum(counters["graph_break"].values()))
    counters.clear()

    @torch.compile(backend="eager")
    def whole_step(batch):
        loss = model(batch).square().mean()
        return loss

    for _ in range(2):
        whole_step(torch.ones(4, 8)).backward()
    print("graphs", counters["stats"]["unique_graphs"])
    print("breaks", sum(counters["graph_break"].values()))
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_compiled_ddp_has_the_same_graphs_and_its_forward_is_timed(doctor: Doctor) -> None:
    script = doctor.write("compiled.py", COMPILED)
    bare = doctor.torchrun("--nproc-per-node=1", str(script))
    bare.check_success()
    watched = doctor.run("--nproc-per-node=1", str(script))
    watched.check_success()
    count = re.compile(r"breaks (\d+)")
    assert count.sub("", watched.stdout) == count.sub("", bare.stdout)
    assert "eager" in bare.stdout
    breaks = zip(count.findall(watched.stdout), count.findall(bare.stdout), strict=True)
    assert all(int(ours) <= int(theirs) for ours, theirs in breaks)
    (rank,) = watched.run.last
    steps = rank.steps
    assert len(steps) == 8
    told = [line.split()[1] for line in bare.stdout.splitlines() if "eager " in line]
    assert [repr(step.loss) for step in steps] == told
    assert all(step.forward > 0 and step.backward > 0 and step.optimizer > 0 for step in steps)
    for before, after in pairwise(steps):
        gap = after.start - (before.start + before.total)
        assert abs(gap - after.outside) < 5_000_000, (before.step, gap)
    assert rank.records.of(FaultRecord) == ()
