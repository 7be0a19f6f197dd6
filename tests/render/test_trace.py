"""``ddpdoctor report --trace``: all ranks on one clock, in the format of Chrome's traces."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.commands import report
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.records.supervisor import HangOverRecord, HangRecord
from ddpdoctor.run.ring import RingWriter
from tests.conftest import Doctor
from tests.support.drawn_runs import MS, T0, write_run

Event = dict[str, Any]
STEP = 231.0 * 1000
"""Microseconds."""


def traced(run: Path, *words: str, name: str = "trace.json") -> list[Event]:
    """The events of a run's trace."""
    path = run.parent / name
    report.main([str(run), "--trace", str(path), *words])
    data = path.read_bytes()
    found = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert found["displayTimeUnit"] == "ms"
    events: list[Event] = found["traceEvents"]
    for event in events:
        # What the format wants of each kind.
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert (event["ph"] == "X") == ("dur" in event)
    return events


def of(events: list[Event], category: str, process: int | None = None) -> list[Event]:
    return [
        event
        for event in events
        if event.get("cat") == category and (process is None or event["pid"] == process)
    ]


def test_steps_and_phases_of_each_rank(tmp_path: Path) -> None:
    events = traced(write_run(tmp_path / "run", 2, 30))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "job", 10: "rank 0 on node-a", 11: "rank 1 on node-a"}
    steps = of(events, "step", 11)
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(30)]
    assert [event["ts"] for event in steps] == [STEP * number for number in range(30)]
    assert steps[3]["args"]["gradient norm"] == 1 + steps[3]["args"]["loss"]
    phases = of(events, "phase", 11)[:6]
    order = ["data", "forward", "backward", "wait", "optimizer", "other"]
    assert [event["name"] for event in phases] == order
    for before, after in itertools.pairwise(phases):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
    assert sum(event["dur"] for event in phases) == pytest.approx(STEP)
    assert len(of(events, "dataloader", 10)) == 30


def test_a_name_that_ends_in_gz_is_compressed(tmp_path: Path) -> None:
    assert of(traced(write_run(tmp_path / "run", 1, 2), name="trace.json.gz"), "step")


def test_clocks_of_nodes_are_aligned_by_the_steps(tmp_path: Path) -> None:
    ahead = {"node-a": 0, "node-b": 20_000 * MS}
    events = traced(write_run(tmp_path / "run", 4, 30, slow=-1, ahead=ahead))
    here, there = (of(events, "step", process) for process in (10, 13))
    for one, other in zip(here, there, strict=True):
        # Within what the optimizers of two ranks differ, and not by 20 s.
        assert abs(one["ts"] - other["ts"]) < 2_000
    clocks = json.loads((tmp_path / "trace.json").read_text())["otherData"]["clock offsets in ns"]
    assert clocks["node-b"] == pytest.approx(20_000 * MS, abs=2 * MS)


def test_collectives_with_arrows_by_their_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3, 2)
    for rank in range(3):
        ring = RingWriter(str(run / f"{rank_stem(rank, 0)}.collectives"))
        texts = tuple(map(ring.text, ("all_reduce", "0|0-2", "float32", "SUM", "/job/train.py:7")))
        for number in (1, 2):
            begun = T0 + (number * 100 + rank) * MS
            order = ring.begin(begun, number, texts, (8, 2), 16, -1, 0)  # type: ignore[arg-type]
            if number == 1:
                ring.end(order, T0 + 110 * MS)
    events = traced(run)
    first = [e for e in of(events, "collective") if e["name"] == "all_reduce #1"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in first] == [
        (10, 100_000.0, 10_000.0), (11, 101_000.0, 9_000.0), (12, 102_000.0, 8_000.0),
    ]  # fmt: skip
    assert first[0]["args"] == {
        "sequence": 1, "group": "0|0-2", "dtype": "float32", "reduce": "SUM", "shape": [8, 2],
        "line": "/job/train.py:7",
    }  # fmt: skip
    arrows = [e for e in events if e["name"] == "collective #1"]
    assert [(e["ph"], e["pid"]) for e in arrows] == [("s", 10), ("t", 11), ("f", 12)]
    assert len({e["id"] for e in arrows}) == 1
    second = [e for e in of(events, "collective") if e["name"] == "all_reduce #2"]
    assert {e["args"]["ended"] for e in second} == {"never"}
    assert {e["id"] for e in events if e["name"] == "collective #2"} != {arrows[0]["id"]}


def test_findings_hangs_and_ends_are_on_the_tracks(tmp_path: Path) -> None:
    hang = HangRecord(time=T0 + 40_000 * MS, number=1, restart=0, seconds=31.0)
    over = HangOverRecord(time=T0 + 50_000 * MS, number=1)
    events = traced(write_run(tmp_path / "run", 4, 60, supervisor=[hang, over]))
    found = of(events, "finding")
    assert {event["pid"] for event in found} == {1, 11}, "of the job, and of the slow rank"
    assert all(event["ph"] == "i" and event["name"].startswith("warning DDP610") for event in found)
    (still,) = of(events, "hang")
    assert (still["ts"], still["dur"]) == (9e6, 41e6)


def profile(path: Path, **changed: Any) -> None:
    """What torch.profiler wrote of a second, 100 ms into the run."""
    host = {"pid": 77, "tid": 77, "ts": 1.1e6}
    found = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": T0 - 10**9,
        "distributedInfo": {"backend": "gloo", "rank": 1, "world_size": 2},
        "traceEvents": [
            {**host, "ph": "M", "name": "process_name", "args": {"name": "python"}},
            {**host, "ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 5.0},
            {"ph": "X", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.2e6, "dur": 5.0},
            {**host, "ph": "s", "id": 3, "cat": "ac2g", "name": "ac2g"},
            {"ph": "X", "name": "Profiler", "pid": "Spans", "tid": "x", "ts": 1.1e6, "dur": 2.0},
        ],
    }
    path.parent.mkdir(exist_ok=True)
    data = json.dumps({**found, **changed}).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)


def test_traces_of_the_profiler_are_merged_on_the_same_clock(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2, 3)
    profile(tmp_path / "profiles" / "a.pt.trace.json")
    profile(tmp_path / "profiles" / "b.pt.trace.json.gz", distributedInfo={"rank": 0})
    (tmp_path / "profiles" / "other.json").write_text('{"a": 1}')
    events = traced(run, "--with", str(tmp_path / "profiles"))
    operations = [e for e in events if e["name"] == "aten::mm"]
    assert [e["ts"] for e in operations] == [1e5, 1e5]
    kernels = [e for e in events if e["name"] == "gemm"]
    places = {e["pid"] for e in (*operations, *kernels)}
    assert len(places) == 4 and not places & {1, 10, 11}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[operations[0]["pid"]] == "rank 1 profiler: python 77"
    # Perfetto draws arrows of numbers; these are of two ranks.
    arrows = [e["id"] for e in events if e["name"] == "ac2g"]
    assert all(isinstance(each, int) for each in arrows) and len({*arrows}) == 2
    assert {"rank 0 profiler: Spans", "rank 1 profiler: Spans"} <= {*names.values()}


def test_traces_of_two_cycles_of_one_rank_share_its_processes_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2, 3)
    turned = [
        {"ph": "X", "name": "late", "pid": 0, "tid": 7, "ts": 3e6, "dur": 5.0},
        {"ph": "s", "pid": 77, "tid": 77, "ts": 3e6, "id": 3, "cat": "ac2g", "name": "ac2g"},
    ]
    profile(tmp_path / "p" / "a.pt.trace.json")
    profile(tmp_path / "p" / "b.pt.trace.json", traceEvents=turned)
    events = traced(run, "--with", str(tmp_path / "p"))
    (first,) = (e["pid"] for e in events if e["name"] == "gemm")
    (second,) = (e["pid"] for e in events if e["name"] == "late")
    assert first == second, "both are GPU 0"
    arrows = [e for e in events if e["name"] == "ac2g"]
    assert len({e["id"] for e in arrows}) == 2 and len({e["pid"] for e in arrows}) == 1


PROFILED = """
    import sys
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile, record_function
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(24, 8))
    loader = DataLoader(data, 2, sampler=DistributedSampler(data))
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        for step, (batch,) in enumerate(loader):
            with record_function(f"within step {step}"):
                time.sleep(0.02)
                model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(torch.ones(1))
    profiler.export_chrome_trace(f"profiles/{rank}.json")
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_the_profiler_wrote_lies_on_the_steps_of_its_rank(doctor: Doctor) -> None:
    script = doctor.write("profiled.py", PROFILED)
    profiles = doctor.directory / "profiles"
    profiles.mkdir()
    result = doctor.run("--no-vscode", "--nproc-per-node", "2", "--", str(script))
    result.check_success()
    raw = [json.loads((profiles / f"{rank}.json").read_text())["traceEvents"] for rank in (0, 1)]
    events = traced(result.run_dir, "--with", str(profiles))
    merged = [e for e in events if e["pid"] >= 1_000_000]
    assert len([e for e in merged if e["ph"] != "M"]) == sum(
        e["ph"] != "M" for each in raw for e in each
    )
    for rank in (0, 1):
        mine = [e for e in merged if e["pid"] // 1_000_000 == rank + 1]
        steps = of(events, "step", 10 + rank)
        assert [e["name"] for e in steps] == [f"step {number}" for number in range(6)]
        for step in steps:
            (within,) = (e for e in mine if e["name"] == f"within {step['name']}")
            # Two clocks of one machine: what is in the middle of it is in its step.
            middle = within["ts"] + within["dur"] / 2
            assert step["ts"] < middle < step["ts"] + step["dur"]
        forwards = [e for e in mine if e["name"] == "DistributedDataParallel.forward"]
        assert len(forwards) == 6
        for forward in forwards:
            assert steps[0]["ts"] < forward["ts"] < steps[-1]["ts"] + steps[-1]["dur"]
    # Each process has one name, and each arrow one beginning, one end and a place on a slice.
    named = [e["pid"] for e in events if e["name"] == "process_name"]
    assert len({*named}) == len(named) and {*named} == {e["pid"] for e in events}
    arrows: dict[tuple[str, int], list[str]] = {}
    for event in events:
        if event["ph"] in "stf":
            assert isinstance(event["id"], int)
            arrows.setdefault((event["cat"], event["id"]), []).append(event["ph"])
    assert {category for category, _ in arrows} == {"collective", "fwdbwd"}
    assert {"".join(sorted(each)) for each in arrows.values()} == {"fs"}
    flows = [e for each in raw for e in each if e.get("cat") == "fwdbwd" and e["ph"] == "s"]
    assert len([1 for category, _ in arrows if category == "fwdbwd"]) == len(flows)


@pytest.mark.parametrize("name", ["rank1.json", "host_4101.1234.pt.trace.json"])
def test_a_profile_without_its_rank_is_known_by_name_or_process(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", 2, 3)
    pid = int((run / "rank-0001.r0.status").read_bytes()[16:20][::-1].hex(), 16)
    event = {"ph": "X", "name": "op", "pid": pid if "rank" not in name else 5, "tid": 1}
    event |= {"ts": (T0 + 5 * 10**9) / 1000, "dur": 1}
    # An older torch: no rank, and microseconds since 1970.
    profile(
        tmp_path / "p" / name, distributedInfo=None, baseTimeNanoseconds=None, traceEvents=[event]
    )
    (operation,) = (e for e in traced(run, "--with", str(tmp_path / "p")) if e["name"] == "op")
    assert operation["ts"] == pytest.approx(5e6, abs=1)
    assert operation["pid"] // 1_000_000 in (1, 2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no trace of torch.profiler"),
        ("{", "cannot read"),
        ('{"traceEvents": []}', "belongs to no rank"),
    ],
)
def test_what_is_no_profile_is_one_line(tmp_path: Path, content: str | None, said: str) -> None:
    run = write_run(tmp_path / "run", 1, 1)
    (tmp_path / "p").mkdir()
    if content is not None:
        (tmp_path / "p" / "x.json").write_text(content)
    with pytest.raises(DoctorError, match=said):
        report.main([str(run), "--trace", str(tmp_path / "t"), "--with", str(tmp_path / "p")])
