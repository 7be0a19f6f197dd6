"""What a real run keeps for its reports: gradient norms, memory over time, its code."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddpdoctor.probe.observers.steps import OpenStep
from ddpdoctor.probe.runtime.phases import Timed
from ddpdoctor.probe.runtime.recorder import Vitals
from ddpdoctor.run import code_version, vitals
from ddpdoctor.run import vitals as keeping
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.supervisor import VitalsRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.records.typed_json import parse
from ddpdoctor.run.status import Parts, StatusPage
from ddpdoctor.run.step_series import _STEP, PARTS, series
from tests.conftest import Doctor
from tests.support.drawn_runs import T0, write_run
from tests.support.written import MS, Written

SCRIPT = """
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        model(torch.full((2, 4), 1.0 + step)).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if dist.get_rank() == 0:
            print(f"norm {norm.item()!r}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.5)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_run_keeps_norms_memory_and_code(doctor: Doctor) -> None:
    script = doctor.write("train.py", SCRIPT)
    result = doctor.run("--nproc-per-node", "2", str(script))
    result.check_success()
    printed = [float(line.split()[1]) for line in result.stdout.splitlines()]
    steps = result.run.rank(0).steps
    assert [step.norm for step in steps] == printed
    found = series(result.run, result.run.last, 100)
    assert list(found.ranks[0].norm) == printed, "the reader of long runs knows the same line"
    samples = vitals.read_vitals(result.run_dir)
    assert {memory.rank for each in samples for memory in each.ranks} <= {0, 1}
    assert any(memory.rss for each in samples for memory in each.ranks)
    kept = code_version.read(result.run_dir)
    assert kept is not None and kept.text == script.read_text()
    assert kept.files.keys() == {"train.py"}


@pytest.mark.parametrize("loss", [None, 0.25, 1e-30, math.nan, -math.inf, lambda: math.nan])
@pytest.mark.parametrize("norm", [None, 3.5, math.inf, math.nan])
@pytest.mark.parametrize("passes", [[1], [4], [1, 2, 4]])
@pytest.mark.parametrize("rare", [False, True])
def test_the_fast_reader_of_steps_reads_what_the_decoder_reads(
    loss: Any, norm: float | None, passes: list[int], rare: bool
) -> None:
    without = cast(Vitals, SimpleNamespace(wrote=lambda parts: None))
    step = OpenStep(7, T0, without, passes)
    step.last, step.loss, step.norm = 7 + len(passes), loss, norm
    step.times = [0, 5 * MS, 90 * MS, 20 * MS, 30 * MS, 40 * MS, 50 * MS, 0]
    if rare:
        step.epoch, step.cores, step.fetched, step.full = 3, (9 * MS, MS), 8, 1
        step.armed, step.timed, step.exposed, step.skipped, step.outside = 2, 1, MS, True, 5
    line = step.line()
    record, match = parse(line), _STEP.match(line)
    assert isinstance(record, StepRecord) and match is not None
    assert [int(text) for text in match.group(1, 2, 9)] == [record.step, record.start, record.total]
    assert [int(text) for text in match.group(3, 4, 5, 6, 7, 8)] == [
        getattr(record, part) for part in PARTS
    ]
    assert (match[10] == b"true") is record.split
    assert int(match[11] or 1) == record.steps == len(passes)
    for text, value in ((match[12], record.loss), (match[13], record.norm)):
        assert (text is None) == (value is None)
        if text is not None and value is not None:
            assert float(text) == value or math.isnan(float(text)) is math.isnan(value) is True


def test_a_line_of_several_short_steps_counts_as_many(written: Written) -> None:
    without = cast(Vitals, SimpleNamespace(wrote=lambda parts: None))
    lines = []
    for passes, forward, loss in (([1], 100, 2.0), ([1, 2, 3, 4], 4 * 200, 1.0)):
        step = OpenStep(0, T0, without, passes)
        step.last, step.loss, step.norm = 7 + len(passes), loss, 3.0 + loss
        step.times, step.fetched, step.full = [0, 0, 0, forward, 0, 0, 0, 0], 8, 1
        lines.append(step.line())
    written.rank(0, lines)
    assert written.findings() == [], "it writes the rest of the run"
    run = RunReader(written.path).snapshot()
    (found,) = series(run, run.last, 1).ranks
    assert found.steps == found.split == 5
    assert found.parts[PARTS.index("forward")][0] == (100 + 4 * 200) / 5
    assert (found.loss[0], found.norm[0]) == (1.0, 4.0)


def test_a_line_reaches_over_the_columns_of_its_steps(written: Written) -> None:
    without = cast(Vitals, SimpleNamespace(wrote=lambda parts: None))
    lines = []
    for last in (3, 7, 11):
        step = OpenStep(0, T0 + (last - 3) * 50 * MS, without, [1, 2, 3, 4])
        step.last, step.times = last, [0, 0, 0, 4 * 50 * MS, 0, 0, 0, 0]
        lines.append(step.line())
    written.rank(0, lines)
    assert written.findings() == [], "it writes the rest of the run"
    run = RunReader(written.path).snapshot()
    (found,) = series(run, run.last, 1 << 16).ranks
    assert list(found.parts[PARTS.index("forward")]) == [50 * MS] * 9, (
        "from the end of the first line"
    )
    assert found.steps == 9 and list(found.starts) == sorted(found.starts)


@pytest.mark.parametrize(("host", "data"), [(200, 200), (9_000, 1_000)])
def test_steps_that_a_gpu_thins_out_wait_no_longer_for_data_than_their_host(
    host: int, data: int
) -> None:
    """Of a loader that is late in every 4th step, these may be the ones that are seen in full."""
    without = cast(Vitals, SimpleNamespace(wrote=lambda parts: None))
    step = OpenStep(0, T0, without, [1, 2, 3, 4])
    step.last, step.times = 3, [0, 0, host, 0, 0, 0, 0, 0]
    # Of the device: 200 of the first step's 240 were for data; then three steps like the rest.
    step.measured = lambda: Timed([960, 0, 200, 10, 20, 10, 0, 0])
    line = json.loads(step.line())
    assert line["data"] == data // 4
    assert line["total"] == pytest.approx((240 + 960) / 4, abs=5)


def test_the_page_shows_the_newest_step_whether_ddp_timed_it_or_not() -> None:
    shown: list[Parts] = []
    page = SimpleNamespace(
        set_parts=shown.append, set_beat=lambda now: None, set_memory=lambda rss, given: None
    )
    watched = Vitals(cast(StatusPage, page))
    for number, split in ((98, False), (99, True), (100, False)):
        watched.wrote(Parts(number, 0, 1, 2, 3, 4, 0, split, 0, 0))
        watched.store()
    assert [each.number for each in shown] == [98, 99, 100]


def test_memory_over_time_never_grows_large(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("ddpdoctor.run.vitals.time", clock)
    run = write_run(written.path / "run", 2, 1)
    (run / "vitals.jsonl").unlink()
    watch = keeping.Vitals(run)
    snapshot = RunReader(run).snapshot()
    for _ in range(4 * keeping.MAX_KEPT):
        assert watch.look(snapshot) is False
        now[0] += keeping.SAMPLE_INTERVAL
    samples: list[VitalsRecord] = vitals.read_vitals(run)
    assert keeping.MAX_KEPT / 2 <= len(samples) <= keeping.MAX_KEPT
    assert [memory.rank for memory in samples[-1].ranks] == [0, 1]
