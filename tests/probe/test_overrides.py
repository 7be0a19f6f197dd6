"""What ``ddpdoctor scale --try`` overrides in a rank: arguments of real classes of torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddpdoctor.probe.hooks import overrides as hooks
from ddpdoctor.probe.runtime import rank
from ddpdoctor.run import overrides
from ddpdoctor.run.records.process import OverrideRecord


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
    assert [(each.owner, each.name, each.value) for each in noted] == [
        ("DistributedDataParallel", "bucket_cap_mb", "2.0"),
        ("DistributedDataParallel", "gradient_as_bucket_view", "True"),
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
