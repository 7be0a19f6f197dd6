"""Ranks that hold memory on another rank's GPU (DDP503)."""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdoctor.core.finding import Finding
from ddpdoctor.probe.hooks import ddp, training
from ddpdoctor.probe.observers import failures
from ddpdoctor.probe.runtime import rank as rank_state
from ddpdoctor.probe.runtime import shield, torch_private
from ddpdoctor.run.names import namespace
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import FaultRecord, OpenRecord
from ddpdoctor.run.records.supervisor import GpusRecord
from ddpdoctor.run.snapshot import Rank, Records, Run
from ddpdoctor.run.status import Phase, Status
from ddpdoctor.supervise.slow_ranks import GpuWatch
from ddpdoctor.system.nvml import NvmlReader
from tests.conftest import Doctor
from tests.fake_nvml import FOLDER, Machine
from tests.support.probed import a_rank
from tests.support.written import SECOND, T0, Written

A, B = "GPU-aaaa", "GPU-bbbb"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path / "machine.json", monkeypatch)
    machine.has({"uuid": A}, {"uuid": B})
    yield machine
    sys.modules.pop("pynvml", None)


# -- the supervisor's look


def rank(number: int, pid: int, uuid: str, place: str | None = None) -> Rank:
    status = Status(pid, number, 2, number, 0, T0, Phase.DATA, T0, 3, None, 3, 0, 0, False, "", "")
    return Rank(
        rank=number,
        restart=0,
        status=status,
        opened=OpenRecord(format=1, rank=number, namespace=place or namespace()),
        records=Records([DdpRecord(device_uuid=uuid)]),
    )


def a_run(*ranks: Rank) -> Run:
    return Run(path=Path(), manifest={}, ranks=ranks)


def looked(watch: GpuWatch, run: Run, enough: int = 1) -> list[GpusRecord | FaultRecord]:
    """What is told within a while, the first ``enough`` of it at once."""
    found: list[GpusRecord | FaultRecord] = []
    deadline = time.monotonic() + (10 if enough else 0.5)
    while time.monotonic() < deadline and len(found) < max(enough, 1):
        found += watch.look_at(run)
        time.sleep(0.01)
    return found


def test_what_the_ranks_hold_is_told_when_it_is_news(machine: Machine) -> None:
    machine.has(
        {"uuid": A, "processes": [[101, 5], [102, 6], [999, 7]]},
        {"uuid": B, "processes": [[102, None]]},
    )
    watch = GpuWatch(first=0, again=0)
    run = a_run(rank(0, 101, "aaaa"), rank(1, 102, "bbbb"))
    (told,) = looked(watch, run)
    assert isinstance(told, GpusRecord)
    assert [(each.rank, each.device_uuid, each.bytes) for each in told.held] == [
        (0, A, 5),
        (1, A, 6),
        (1, B, None),
    ]
    assert looked(watch, run, 0) == []
    machine.has(
        {"uuid": A, "processes": [[101, 5], [102, 6]]},
        {"uuid": B, "processes": [[102, 1], [101, 1]]},
    )
    (again,) = looked(watch, run)
    assert isinstance(again, GpusRecord) and len(again.held) == 4


def test_a_job_on_the_cpu_or_of_another_namespace_never_touches_nvml() -> None:
    def make() -> Any:
        raise AssertionError

    watch = GpuWatch(make, first=0, again=0)
    run = a_run(rank(0, 101, ""), rank(1, 102, "bbbb", "another/machine"))
    assert looked(watch, run, 0) == []


def test_partitions_are_left_out(machine: Machine) -> None:
    machine.has({"uuid": A, "mig": 1, "processes": [[101, 5]]})
    assert looked(GpuWatch(first=0, again=0), a_run(rank(0, 101, "aaaa")), 0) == []


def test_a_reader_that_fails_is_asked_no_more() -> None:
    class Broken(NvmlReader):
        asked = 0

        def devices(self) -> Any:
            Broken.asked += 1
            raise ValueError("broken")

    watch = GpuWatch(Broken, first=0, again=0)
    run = a_run(rank(0, 101, "aaaa"))
    (told,) = looked(watch, run)
    assert isinstance(told, FaultRecord)
    assert looked(watch, run, 0) == []
    assert Broken.asked == 1


# -- DDP503


def held(number: int, uuid: str, size: int | None = 2**29) -> JsonObject:
    gpu = {A: 0, B: 1}.get(uuid, 2)
    return {"rank": number, "restart": 0, "device_uuid": uuid, "gpu": gpu, "bytes": size}


HEALTHY = (held(0, A), held(1, B))


def judged(
    written: Written,
    *looks: tuple[JsonObject, ...],
    own: tuple[list[str], list[str]] = (["aaaa"], ["bbbb"]),
    loaded: JsonObject | None = None,
    before: tuple[JsonObject, ...] = (),
) -> list[Finding]:
    for number in (0, 1):
        records = [{"kind": "ddp", "group_ranks": [0, 1], "device_uuids": own[number]}]
        written.rank(number, records + ([loaded] if loaded is not None and number else []))
    written.supervisor += before
    for number, look in enumerate(looks):
        time = T0 + (number + 1) * SECOND
        written.supervisor.append({"kind": "gpus", "time": time, "held": list(look)})
    return [each for each in written.findings() if each.code == "DDP503"]


LOADED = {
    "kind": "gpu_load",
    "time": T0,
    "device": "cuda:0",
    "device_uuid": "aaaa",
    "mapped": False,
    "path": "/job/train.py",
    "line": 40,
}


def test_a_load_onto_the_first_gpu_is_named(written: Written) -> None:
    (finding,) = judged(written, (*HEALTHY, held(1, A)), loaded=LOADED)
    assert finding.ranks == (1,)
    assert str(finding.location) == "/job/train.py:40"
    assert "without map_location" in finding.message
    assert "rank 0's own" in finding.message
    assert "512 MiB on GPU 0" in finding.evidence[0]


def test_a_context_without_a_load_has_no_line(written: Written) -> None:
    (finding,) = judged(
        written, HEALTHY, (*HEALTHY, held(1, A, None)), loaded={**LOADED, "device_uuid": "bbbb"}
    )
    assert finding.location is None
    assert "set_device" in finding.fix


def test_one_finding_for_one_line(written: Written) -> None:
    look = (*HEALTHY, held(1, A))
    assert len(judged(written, look, look, loaded=LOADED)) == 1


def test_healthy_ranks_are_left_alone(written: Written) -> None:
    assert judged(written, HEALTHY, loaded=LOADED) == []


def test_ranks_that_share_a_gpu(written: Written) -> None:
    assert judged(written, (held(0, A), held(1, A)), own=(["aaaa"], ["aaaa"])) == []


def test_a_model_on_several_gpus(written: Written) -> None:
    both = ["aaaa", "bbbb"]
    assert judged(written, (*HEALTHY, held(0, B), held(1, A)), own=(both, both)) == []


def test_a_gpu_on_which_no_rank_trains(written: Written) -> None:
    assert judged(written, (*HEALTHY, held(0, "GPU-cccc"))) == []


def test_pids_of_another_namespace(written: Written) -> None:
    # Somebody's process 102 on GPU 0, and no rank on its own GPU.
    assert judged(written, (held(1, A),), loaded=LOADED) == []


def test_a_rank_whose_gpu_is_not_known(written: Written) -> None:
    assert judged(written, (*HEALTHY, held(1, A)), own=(["aaaa"], [])) == []
    assert judged_again(written, ([], ["bbbb"])) == []


def judged_again(written: Written, own: tuple[list[str], list[str]]) -> list[Finding]:
    other = Written(written.path / "again")
    other.path.mkdir()
    return judged(other, (*HEALTHY, held(1, A)), own=own)


def test_what_a_debugger_may_have_done(written: Written) -> None:
    attached = {"kind": "debug", "rank": 0, "state": "attached", "time": T0}
    assert judged(written, (*HEALTHY, held(1, A)), before=(attached,)) == []


def test_what_was_seen_before_the_debugger_came(written: Written) -> None:
    attached = {"kind": "debug", "rank": 0, "state": "attached", "time": T0 + 5 * SECOND}
    assert len(judged(written, (*HEALTHY, held(1, A)), before=(attached,))) == 1


# -- loads


def storage(device: str) -> Any:
    return types.SimpleNamespace(device=torch.device(device))


@pytest.mark.parametrize(("initialized", "uuids"), [(True, ("u0", "u1")), (False, ())])
def test_a_model_tells_the_gpus_it_lies_on(initialized: bool, uuids: tuple[str, ...]) -> None:
    cuda = types.SimpleNamespace(
        is_initialized=lambda: initialized,
        get_device_properties=lambda device: types.SimpleNamespace(uuid=f"u{device.index}"),
    )
    model = types.SimpleNamespace(
        parameters=lambda: [storage("cuda:1"), storage("cuda:0"), storage("cpu")],
        buffers=lambda: [storage("cuda:1")],
    )
    assert ddp._uuids(types.SimpleNamespace(cuda=cuda), model) == uuids


def test_a_load_is_seen_once_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    serialization = types.ModuleType("serialization")
    serialization.save = lambda obj, f: None  # type: ignore[attr-defined]
    serialization._get_restore_location = lambda where: lambda storage, tag: storage  # type: ignore[attr-defined]
    seen: list[tuple[Any, bool]] = []
    monkeypatch.setattr(failures, "tensors_loaded", lambda *each: seen.append(each))
    training.install_serialization(serialization)
    on_gpu, on_cpu = storage("cuda:0"), storage("cpu")
    for where in (None, "cuda:0"):
        restore = serialization._get_restore_location(where)
        assert restore(on_gpu, "cuda:0") is on_gpu
        assert restore(on_gpu, "cuda:0") is on_gpu
        assert restore(on_cpu, "cpu") is on_cpu
    assert seen == [(on_gpu.device, False), (on_gpu.device, True)]


def test_what_is_loaded_before_there_is_a_rank_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_state, "_early", [])
    for name in ("_state", "active", "is_tracing"):
        monkeypatch.setattr(rank_state, name, getattr(rank_state, name))
    for _ in range(2):
        failures.tensors_loaded(torch.device("cuda:0"), False)
    written: list[JsonObject] = []
    rank_state.enter(a_rank(written), bool)
    shield.report_to(None)
    failures.tensors_loaded(torch.device("cuda:0"), False)
    assert len(written) == 2
    record = written[0]
    assert (record["kind"], record["device"], record["mapped"]) == ("gpu_load", "cuda:0", False)
    assert record["path"] == __file__
    assert written[1]["line"] != record["line"]


def test_a_real_load_goes_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.load`` asks what the hook wraps, once."""
    asked = []
    original = getattr(torch.serialization, torch_private.RESTORE_LOCATION)

    def noted(where: Any) -> Any:
        asked.append(where)
        return original(where)

    monkeypatch.setattr(torch.serialization, "_get_restore_location", noted)
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", map_location="cpu", weights_only=True)
    torch.load(tmp_path / "a.pt", weights_only=True)
    assert asked == ["cpu", None]


JOB = """
import json, os, time, torch, torch.distributed as dist
from ddpdoctor.probe.runtime import rank as probe
from ddpdoctor.run.records.model import DdpRecord
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
if rank == 0:
    gpus = [
        {"uuid": "GPU-aaaa", "processes": [[pids[0], 2**30], [pids[1], 2**29], [1, 1]]},
        {"uuid": "GPU-bbbb", "processes": [[pids[1], 2**30]]},
    ]
    with open(os.environ["FAKE_NVML"], "w") as file:
        json.dump({"gpus": gpus}, file)
dist.barrier()
model = DDP(torch.nn.Linear(2, 2))
uuid = ["aaaa", "bbbb"][rank]
own = DdpRecord(device_uuid=uuid, device_uuids=(uuid,), group_ranks=(0, 1))
probe.current().recorder.add(own)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(80):
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_the_supervisor_looks_and_the_finding_is_said(doctor: Doctor) -> None:
    job = doctor.write("train.py", JOB)
    path = doctor.directory / "machine.json"
    path.write_text(json.dumps({"gpus": []}))
    env = {"PYTHONPATH": str(FOLDER), "FAKE_NVML": str(path)}
    result = doctor.run("--nproc-per-node", "2", str(job), env=env)
    result.check_success()
    looks = result.run.supervisor.of(GpusRecord)
    assert len(looks) == 1, result.stderr
    assert [(each.rank, each.device_uuid) for each in looks[0].held] == [
        (0, "GPU-aaaa"),
        (1, "GPU-aaaa"),
        (1, "GPU-bbbb"),
    ]
    assert "rank 1 holds memory on GPU 0, rank 0's own" in result.ours
