"""The memory that a rank records, and what it records when a GPU's memory runs out."""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.probe.observers import memory
from ddpdoctor.probe.observers.memory import Memory, Workers, available, large_containers
from ddpdoctor.probe.runtime import events, torch_memory
from ddpdoctor.run.records.base import JsonObject
from tests.support.probed import Purse, a_rank


@pytest.fixture
def records() -> list[JsonObject]:
    return []


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    events.forget()


def observed(records: list[JsonObject], **tracker: Any) -> tuple[Memory, Any]:
    state = a_rank(
        records, Purse(1 << 40), device=None, memory_of=None, last_total=10_000_000, **tracker
    )
    return Memory(state), state


def steps(state: Any, count: int) -> None:
    for _ in range(count):
        state.tracker.steps += 1
        if state.tracker.steps >= events.due:
            events.ring(state.tracker.steps)


def test_the_first_steps_are_read_one_by_one_and_later_ones_more_rarely(
    records: list[JsonObject], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock.now)
    observer, state = observed(records)
    for _ in range(4000):
        clock.now += 10_000_000
        steps(state, 1)
    observer.write()
    points = next(each for each in records if each["kind"] == "memory")["points"]
    numbers = [each[0] for each in points]
    assert numbers[:30] == [*range(1, 31)]
    assert 64 * 3 < len(numbers) < 64 * 7
    assert numbers[-1] - numbers[-2] > 30


def test_a_leak_is_looked_at_and_recorded(
    records: list[JsonObject], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = SimpleNamespace(now=300 << 20)
    monkeypatch.setattr(memory, "statm", lambda pid="self": (4 * size.now, size.now, 0))
    kept: list[Any] = []
    observer, state = observed(records)
    for _ in range(100):
        size.now += 4 << 20
        kept.append(torch.ones(1 << 20))
        steps(state, 1)
    observer.rank_ends()
    newest = [each for each in records if each["kind"] == "holders"][-1]
    assert newest["looks"] == len(memory.SCAN_INTERVALS)
    assert newest["found"][0][0] == "kept"


class Allocator:
    """``torch.cuda.memory``: each step allocates 4 MiB at line 7 that stay, and 9 that do not."""

    def __init__(self) -> None:
        self.kept = 0
        self.calls: list[Any] = []
        self.traces: list[Any] = [[{}]]

    def _record_memory_history(self, enabled: str | None, context: str | None, stacks: str) -> None:
        self.calls.append(enabled)

    def _snapshot(self, device: Any) -> Any:
        frames = [{"filename": __file__, "line": 7}], [{"filename": __file__, "line": 9}]
        size = {"state": "active_allocated"}
        blocks = [{**size, "size": 4 << 20, "frames": frames[0]} for _ in range(self.kept)]
        blocks.append({**size, "size": 9 << 20, "frames": frames[1]})
        return {"segments": [{"blocks": blocks}], "device_traces": self.traces}


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(torch.cuda, "memory", found)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    return found


def test_lines_whose_allocations_stay(allocator: Allocator) -> None:
    sites = torch_memory.AllocationSites("cuda:0")
    assert not sites.look()
    allocator.kept += 3
    assert [*sites.look().items()] == [((__file__, 7), 12 << 20)]
    sites.end()
    sites.end()
    assert allocator.calls == ["state", None]


def test_a_job_that_records_allocations_itself_goes_on(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = torch_memory.AllocationSites("cuda:0")
    allocator.traces = [[{}, {}]]  # since then
    sites.look()
    sites.end()
    assert allocator.calls == ["state"]
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    sites = torch_memory.AllocationSites("cuda:0")
    assert not sites.look()
    sites.end()
    assert allocator.calls == ["state"]


def test_pages_of_memory_that_was_allocated_before_do_not_count(
    records: list[JsonObject], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = SimpleNamespace(now=300 << 20)
    monkeypatch.setattr(memory, "statm", lambda pid="self": (1 << 40, size.now, 0))
    observer, state = observed(records)
    for _ in range(100):
        size.now += 4 << 20
        steps(state, 1)
    observer.rank_ends()
    assert {each["kind"] for each in records} == {"memory"}
    assert len({point[2] for each in records for point in each.get("points", ())}) == 1


class Cuda:
    """What is asked of a GPU whose memory ran out."""

    def __init__(self) -> None:
        self.memory = SimpleNamespace(_snapshot=self.snapshot)

    def memory_stats_as_nested_dict(self, device: object) -> Any:
        return {
            "allocated_bytes": {"all": {"current": 60, "peak": 70}},
            "reserved_bytes": {"all": {"current": 80, "peak": 80}},
        }

    def get_device_properties(self, device: object) -> Any:
        return SimpleNamespace(total_memory=100)

    def snapshot(self, device: object) -> Any:
        frames = [{"filename": "/usr/lib/python3/site-packages/torch/x.py", "line": 1, "name": "f"}]
        frames.append({"filename": "/job/train.py", "line": 9, "name": "main"})
        blocks = [{"size": 20, "state": "active_allocated", "frames": frames}] * 3
        return {"segments": [{"blocks": [*blocks, {"size": 15, "state": "inactive"}]}]}


def test_what_a_full_gpu_held_is_recorded_with_a_snapshot(
    records: list[JsonObject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPDOCTOR_RUN_DIR", str(tmp_path))
    observer, state = observed(records)
    state.tracker.memory_of = "cuda:0"
    monkeypatch.setattr(torch, "cuda", Cuda())
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    steps(state, 5)
    observer.batch_fetched(None, (torch.ones(8, 100), torch.ones(8)))
    observer.batch_fetched(None, {"ids": torch.ones(8, 900)})
    observer.rank_fails(ValueError())
    assert not any(each["kind"] == "out_of_memory" for each in records)
    observer.rank_fails(torch.OutOfMemoryError("CUDA out of memory."))
    found = records[-1]
    assert found["kind"] == "out_of_memory"
    assert found["gpu"]["blocks"] == [[20, 3, ["/job/train.py", 9]]]
    assert found["gpu"]["largest_free"] == 15
    assert (found["shape"], found["largest"]) == ([8, 900], [8, 100])
    kept = tmp_path / found["file"]
    assert kept.name == "rank-0003.r0.memory.pickle"
    assert pickle.loads(kept.read_bytes())["segments"]


def test_an_allocator_without_counters_is_no_fault(
    records: list[JsonObject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPDOCTOR_RUN_DIR", str(tmp_path))
    observer, state = observed(records)
    state.tracker.memory_of = "cuda:0"
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(memory=SimpleNamespace()))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    steps(state, 5)
    observer.rank_fails(torch.OutOfMemoryError("CUDA out of memory."))
    assert records[-1]["kind"] == "out_of_memory"
    assert "gpu" not in records[-1]


def test_large_containers_of_a_data_set_are_found_through_a_subset() -> None:
    class Files(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.paths = [f"{'x' * 200}{number}" for number in range(100_000)]
            self.table = torch.zeros(100_000, 64)
            self.few = ["a", "b"]

        def __getitem__(self, index: int) -> Any:
            return self.paths[index]

    (record,) = large_containers(torch.utils.data.Subset(Files(), [0]))
    assert (record.type, record.name, record.holds) == ("Files", "paths", "list of str")
    assert record.path == __file__


def test_workers_are_read_rarely_and_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "child_pids", lambda: [9, 7])
    monkeypatch.setattr(memory, "statm", lambda pid: (100, 60, 20))
    monkeypatch.setattr(memory, "_private_of", lambda pid: 5)
    workers = Workers()
    assert workers.look() is None
    workers.present = True
    first = workers.look()
    assert first == (7, 40, 2, None)
    assert workers.look() is None
    workers.copies, workers._due = True, 0
    second = workers.look()
    assert second is not None
    assert second.private == 5


def test_the_memory_that_is_left_is_known() -> None:
    left = available()
    assert left is not None
    assert 0 < left < 1 << 50
    assert sys.platform == "linux"
