"""DDP620, DDP621: memory that grows in each step, what holds it, and growth that ends."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.core.finding import Finding, Severity, explains
from ddpdoctor.run.memory_growth import steady_growth
from ddpdoctor.run.records.base import CodeFrame, Record
from ddpdoctor.run.records.memory import (
    DatasetRecord,
    Holder,
    HoldersRecord,
    MemoryPoint,
    MemoryRecord,
    WorkerMemory,
)
from ddpdoctor.run.records.training import LoopRecord, PassRecord, SiteRecord
from tests.conftest import Doctor
from tests.support.written import MS, SECOND, T0, Written

MIB = 1 << 20

JOB = """\
def main():
    hist = []
    for step in range(1000):
        loss = train(step)
        hist.append(loss)
"""


def memory(
    of: Callable[[int], float], steps: int = 200, *, gpu: bool = False, available: int = 1 << 34
) -> MemoryRecord:
    """What a rank records of 200 steps, in MiB by step."""
    points = tuple(
        MemoryPoint(step, T0 + step * 10 * MS, 300 * MIB, int(of(step) * MIB), int(of(step) * MIB))
        if gpu
        else MemoryPoint(step, T0 + step * 10 * MS, int(of(step) * MIB))
        for step in range(1, steps, 2)
    )
    return MemoryRecord(time=T0, points=points, available=available, total=80 << 30)


def held(
    path: str = "/job/train.py",
    name: str = "hist",
    *,
    sort: str = "list",
    graph: bool = True,
    each: int | None = None,
    bound: int | None = None,
    function: str = "main",
    looks: int = 5,
) -> HoldersRecord:
    """What several looks have found."""
    holder = Holder(name, sort, CodeFrame(path, 1, function), 90, 30, "Tensor", each, graph, bound)
    return HoldersRecord(time=T0, first=60, step=90, looks=looks, found=(holder,))


def leak(step: int) -> float:
    """The memory of a job that keeps 2 MiB of each step."""
    return 300 + 2 * step


def job(tmp_path: Path, source: str = JOB) -> str:
    path = tmp_path / "train.py"
    path.write_text(source)
    return str(path)


def said(written: Written, *records: Record) -> list[Finding]:
    written.rank(0, records)
    written.rank(1, [])
    return [each for each in written.findings() if each.code.startswith("DDP62")]


def test_graphs_in_a_list_are_named_with_name_line_and_end(
    written: Written, tmp_path: Path
) -> None:
    (finding,) = said(written, memory(leak), held(job(tmp_path)))
    assert (finding.code, finding.ranks) == ("DDP620", (0,))
    assert finding.location is not None
    assert finding.location.line == 5
    assert "grows by 2 MiB in each step" in finding.message
    assert "the list `hist` keeps tensors with the graph" in finding.message
    assert "full in about 8200 steps" in finding.message
    assert "hist.append(loss.item())" in finding.fix


def test_the_end_without_memory_says_it_instead() -> None:
    growth = Finding("DDP620", Severity.WARNING, "grows", (0, 1))
    assert explains(Finding("DDP928", Severity.ERROR, "full", (1,)), growth)
    assert not explains(Finding("DDP928", Severity.ERROR, "full", (2,)), growth)


def test_a_gpu_counts_by_its_allocator_and_its_own_memory(written: Written, tmp_path: Path) -> None:
    (finding,) = said(written, memory(leak, gpu=True), held(job(tmp_path)))
    assert "the GPU memory of rank 0 grows by 2 MiB" in finding.message
    assert "full in about 41000 steps" in finding.message


@pytest.mark.parametrize(
    ("holder", "words"),
    [
        (held(name="net.0._forward_hooks", sort="hooks"), "hooks are added in each step"),
        (held(name="total", sort="graph"), "`total` keeps the graph of each step"),
        (held(name="SEEN", sort="dict", graph=False, each=2 * MIB), "dict `SEEN` gains entries"),
        (held(name="mask", sort="cache", graph=False), "the cache of `mask` keeps every result"),
        (held(name="net.seen", sort="tensor", graph=False), "the tensor `net.seen` gets longer"),
        (held(name="feats", graph=False, each=2 * MIB), "`feats` gains entries (Tensor of 2 MiB)"),
    ],
)  # fmt: skip
def test_each_kind_has_its_words(written: Written, holder: HoldersRecord, words: str) -> None:
    (finding,) = said(written, memory(leak), holder)
    assert words in finding.message


def test_small_entries_are_not_the_cause(written: Written, tmp_path: Path) -> None:
    (finding,) = said(written, memory(leak), held(job(tmp_path), graph=False, each=24))
    assert "no Python object" in finding.message
    assert finding.location is None


def test_a_search_that_ran_out_of_time_says_so(written: Written, tmp_path: Path) -> None:
    found = replace(held(job(tmp_path), graph=False, each=24), complete=False)
    (finding,) = said(written, memory(leak), found)
    assert "is not among the objects examined in time" in finding.message
    assert "a list, a dict or an attribute" in finding.fix


def test_growth_without_a_name_needs_more(written: Written) -> None:
    assert said(written, memory(lambda step: 300 + 0.5 * step), held(graph=False, each=24)) == []


def test_a_rank_that_has_looked_too_little_is_waited_for(written: Written, tmp_path: Path) -> None:
    small = memory(lambda step: 300 + 0.5 * step)
    assert said(written, small, held(job(tmp_path), looks=2)) == []


def test_a_maximum_size_is_no_leak(written: Written, tmp_path: Path) -> None:
    bounded = held(job(tmp_path), graph=False, each=2 * MIB, bound=400)
    assert said(written, memory(leak), bounded) == []


BOUNDED = {
    "cut": "        hist.append(loss)\n        hist = hist[-100:]\n",
    "popped": "        hist.append(loss)\n        if len(hist) > 100: hist.pop(0)\n",
    "cleared": "        hist.append(loss)\n        if step % 100 == 0: hist.clear()\n",
    "deleted": "        hist.append(loss)\n        del hist[:-100]\n",
    "circle": "        if len(hist) < 99: hist.append(None)\n        hist[step % 99] = loss\n",
}


@pytest.mark.parametrize("body", BOUNDED.values(), ids=BOUNDED)
def test_what_the_code_bounds_is_left_alone(written: Written, tmp_path: Path, body: str) -> None:
    path = job(tmp_path, JOB.replace("        hist.append(loss)\n", body))
    assert said(written, memory(leak), held(path, graph=False, each=2 * MIB)) == []


def test_a_name_that_goes_at_the_end_is_not_bounded(written: Written, tmp_path: Path) -> None:
    path = job(tmp_path, JOB + "    del hist\n")
    assert said(written, memory(leak), held(path, graph=False, each=2 * MIB))


PER_PASS = """\
def main():
    for epoch in range(9):
        hist = []
        for step in range(1000):
            hist.append(train(step))
"""
PER_CALL = """\
def epoch(model):
    hist = []
    for step in range(1000):
        hist.append(train(step))
    return sum(hist)

def main():
    for number in range(9):
        epoch(model)
"""


@pytest.mark.parametrize(("source", "function"), [(PER_PASS, "main"), (PER_CALL, "epoch")])
def test_what_is_made_again_in_each_pass_is_left_alone(
    written: Written, tmp_path: Path, source: str, function: str
) -> None:
    path = job(tmp_path, source)
    assert (
        said(written, memory(leak), held(path, graph=False, each=2 * MIB, function=function)) == []
    )


def test_a_data_set_may_fill_its_cache_in_the_first_pass(written: Written, tmp_path: Path) -> None:
    path = job(
        tmp_path, "class D:\n    def __getitem__(self, i):\n        self.cache[i] = load(i)\n"
    )
    holder = held(path, "dataset.cache", sort="dict", graph=False, each=2 * MIB)
    over = LoopRecord(time=T0, loop=0, state="ended", step=10)
    assert said(written, memory(leak), holder) == []
    written.path = written.path / "later"
    written.path.mkdir()
    (finding,) = said(written, memory(leak), holder, over)
    assert finding.location is not None
    assert finding.location.line == 3


# -- growth that is none


def _varying(step: int) -> float:
    return 300 + random.Random(step).random() * 400


SERIES: dict[str, Callable[[int], float]] = {
    "flat": lambda step: 300,
    "warm-up": lambda step: 300 + 200 * (1 - 0.97**step),
    "slowing down": lambda step: 300 + 90 * math.log1p(step),
    "varying lengths": _varying,
    "records of varying lengths": lambda step: max(_varying(each) for each in range(step + 1)),
    "comes back in each pass": lambda step: 300 + 8 * (step % 40),
    "allocated at the first step": lambda step: 300 if step < 3 else 900,
    "a rare jump": lambda step: 300 + 100 * (step // 90),
    "evaluation in between": lambda step: 900 if step % 20 > 16 else 300,
    "a buffer that is full": lambda step: 300 + 4 * min(step, 100),
    "shrinks": lambda step: 900 - 2 * step,
}


@pytest.mark.parametrize("of", SERIES.values(), ids=SERIES)
def test_other_series_are_no_steady_growth(of: Callable[[int], float]) -> None:
    # Until it is full, or until the first pass ends, such a buffer looks like a leak.
    late = of in (SERIES["a buffer that is full"], SERIES["comes back in each pass"])
    for steps in range(170 if late else 20, 200, 7):
        points = [(step, int(of(step) * MIB)) for step in range(steps)]
        assert steady_growth(points, 64 * MIB) is None, steps


def test_growth_is_found_behind_a_warm_up_and_through_noise() -> None:
    points = [
        (step, int((300 + 100 * (1 - 0.9**step) + step + random.Random(step).random() * 9) * MIB))
        for step in range(300)
    ]
    found = steady_growth(points, 32 * MIB)
    assert found is not None
    assert found.per_step == pytest.approx(MIB, rel=0.2)


# -- workers of loaders


def workers(own: Callable[[int], float], private: Callable[[int], float]) -> list[Record]:
    """Readings of a worker, one in two seconds."""
    return [
        MemoryRecord(
            time=T0 + 2 * number * SECOND,
            worker=WorkerMemory(77, int(own(number) * MIB), 2, int(private(number) * MIB)),
        )
        for number in range(12)
    ]


FILES = DatasetRecord(
    type="Files", name="paths", holds="list of str", size=3_000_000, path="/job/data.py", line=12
)


def test_copies_of_a_list_are_named_with_the_data_set(written: Written) -> None:
    records = workers(lambda _: 500, lambda number: 30 + 8 * number)
    (finding,) = said(written, FILES, *records)
    assert finding.code == "DDP621"
    assert "list of str in `Files.paths`" in finding.message
    assert str(finding.location) == "/job/data.py:12"


def test_copies_that_slow_down_are_named(written: Written) -> None:
    records = workers(lambda _: 688, lambda number: 20 + 200 * (1 - 0.9**number))
    (finding,) = said(written, FILES, *records)
    assert finding.code == "DDP621"


def test_what_a_worker_allocates_is_no_copy(written: Written) -> None:
    records = workers(lambda number: 500 + 60 * (1 - 0.8**number), lambda n: 30 + 90 * (1 - 0.8**n))
    assert said(written, FILES, *records) == []


def test_copies_without_a_large_container_are_left_alone(written: Written) -> None:
    assert said(written, *workers(lambda _: 500, lambda number: 30 + 8 * number)) == []


def test_copies_that_end_are_left_alone(written: Written) -> None:
    records = workers(lambda _: 500, lambda number: 30 + 60 * (1 - 0.5**number))
    assert said(written, FILES, *records) == []


def test_a_worker_that_keeps_samples_is_named_after_the_first_pass(written: Written) -> None:
    records = workers(lambda number: 300 + 20 * number, lambda _: 0)
    site = SiteRecord(phase="data", path="/job/train.py", line=3)
    assert said(written, site, *records) == []
    written.path = written.path / "later"
    written.path.mkdir()
    (finding,) = said(written, site, LoopRecord(time=T0, loop=0, state="ended"), *records)
    assert "keeps what it has loaded" in finding.message
    written.path = written.path / "stream"
    written.path.mkdir()
    stream = PassRecord(pass_=0, number=0, state="", iterable=True)
    assert said(written, site, stream, *records)


@pytest.mark.parametrize(("begun", "found"), [(None, []), (20, []), (0, ["DDP621"])])
def test_a_worker_that_still_starts_is_left_alone(
    written: Written, begun: int | None, found: list[str]
) -> None:
    """The workers of a new pass import their modules before the first batch."""
    loops = [LoopRecord(time=T0 - SECOND, loop=0, state="ended")]
    if begun is not None:
        loops.append(LoopRecord(time=T0 + begun * SECOND, loop=1, state="trains"))
    records = workers(lambda number: 300 + 20 * number, lambda _: 0)
    site = SiteRecord(phase="data", path="/job/train.py", line=3)
    assert [each.code for each in said(written, site, *loops, *records)] == found


# -- memory that a C library keeps

LIBRARY = """
import ctypes, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
dist.init_process_group("gloo")
torch.set_num_threads(1)
ddp = DistributedDataParallel(nn.Linear(64, 10))
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
for step in range(400):
    decoded = libc.malloc(3 << 20)
    ctypes.memset(decoded, 1, 3 << 20)
    loss = ddp(torch.randn(32, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if sys.argv[1] == "healed":
        libc.free(decoded)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_memory_that_a_library_keeps(doctor: Doctor) -> None:
    job = str(doctor.write("job.py", LIBRARY))
    sick = doctor.run("--nproc-per-node", "2", "--", job, "sick")
    assert sick.codes == ["DDP620"], sick.stderr
    said = " ".join(sick.ours.split())
    assert "grows by 3 MiB in each step: no Python object that its code can reach holds it" in said
    assert doctor.run("--nproc-per-node", "2", "--", job, "healed").codes == []
