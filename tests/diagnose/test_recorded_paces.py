"""Paces of ranks that were recorded on an H100 with NCCL: one truth, in all views.

Two ranks shared the GPU with other jobs. The files hold the lines of the ranks' journals that are
of use here, without keys that are not.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.user_code import Location
from ddpdoctor.render import reporter
from ddpdoctor.render.chrome_trace import write_trace
from ddpdoctor.render.html import page
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.step_series import series
from ddpdoctor.top.frame_sources import open_source
from tests.support.top_runs import ALL
from tests.support.written import Written

GPU = "e7c7217e-6b40-46e3-c69f-3ee9bbcfc80f"
RECORDED = Path(__file__).parents[1] / "recorded"


def recorded(written: Written, name: str, until: int = 1 << 20) -> list[Finding]:
    """What is said of a recorded run, up to a step."""
    ranks: defaultdict[int, list[JsonObject]] = defaultdict(list)
    with gzip.open(RECORDED / f"{name}.jsonl.gz", "rt") as file:
        for line in file:
            record = json.loads(line)
            rank = record.pop("rank")
            if rank is None:
                written.supervisor.append({**record, "rank": record.pop("asked_rank")})
            elif record.get("step", 0) <= until or record["kind"] != "step":
                ranks[rank].append(record)
    for number, records in ranks.items():
        written.rank(number, records, steps=len(records), gpu=GPU)
    found = written.findings(status=0)
    return [each for each in found if each.code.startswith("DDP6")]


@pytest.mark.parametrize("until", [70, 127])
def test_a_loader_that_is_slow_in_every_second_step(written: Written, until: int) -> None:
    """The median step waits for no data; the others wait for two fifths of the time."""
    (finding,) = recorded(written, "data_h2d", until)
    assert (finding.code, finding.ranks) == ("DDP610", (1,))
    assert finding.message.endswith(
        "in its data loading, in every 2nd step: it waits for its loader workers"
    )
    assert finding.location == Location("/job/g_data_h2d.py", 12)
    assert any("its loader has 2 workers" in each for each in finding.evidence)
    assert "num_workers" in finding.fix


@pytest.mark.parametrize("until", [120, 320, 480, 491, 500, 530, 1023, 1499])
def test_ranks_that_share_a_gpu_with_other_jobs_are_no_stragglers(
    written: Written, until: int
) -> None:
    """DDP timed a few steps; that a line stands for many makes no more of them."""
    assert recorded(written, "sync_every_step", until) == []


def test_a_straggler_is_the_same_in_all_views(written: Written, tmp_path: Path) -> None:
    (finding,) = recorded(written, "straggler_gpu")
    assert (finding.code, finding.ranks) == ("DDP610", (1,))
    assert "by 149 ms a step, in its forward pass" in finding.message
    assert finding.location == Location("/job/g_straggler_gpu.py", 8)

    run = RunReader(written.path).snapshot()
    rows = page.rank_rows(run, run.last, [finding], series(run, run.last, 1 << 16))
    waits = {row["rank"]: row["parts"][5] for row in rows}
    own = {row["rank"]: row["own"] for row in rows}
    assert own[1] > 3 * own[0] and waits[0] > 0.140 > 0.002 > waits[1]

    path = tmp_path / "trace.json"
    write_trace(str(path), run, [finding], [], zipped=False)
    steps = [
        event
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") == "step" and event["name"] == "step 60"
    ]
    assert [round(each["args"]["wait ms"] / 50) for each in steps] == [3, 0]

    assert "wait 3" in next(line for line in reporter.summary_lines(run) if "median step" in line)

    source = open_source(str(written.path))
    assert source.replay is not None
    for frame in (60, source.replay.length - 1):
        source.replay.seek(frame)
        times = {row.rank: row.times for row in source.read(ALL).ranks}
        assert times[0] is not None and times[1] is not None
        assert times[0].split and times[0].wait > 0.140 > 0.002 > times[1].wait
