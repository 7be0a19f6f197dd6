"""What ``ddpdoctor scale`` makes of runs: measurement, efficiency, causes, table and chart."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.errors import HANG, DoctorError
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.run.reader import RunReader
from ddpdoctor.scale import chart, table
from ddpdoctor.scale.results import (
    Outcome,
    Row,
    Size,
    Variant,
    measure,
    median_repeat,
    planned_runs,
    rows,
    sizes,
    variants,
)
from ddpdoctor.scale.session import judge_run
from tests.support.scale_runs import measured, outcome, planned, steps, write_run
from tests.support.written import T0

TRIED = Variant("bucket_cap_mb=1", {"bucket_cap_mb": "1"})


# -- the order of the runs


def test_each_repeat_goes_through_all_sizes() -> None:
    made = list(planned_runs(sizes((1,), (4, 1, 2)), variants((), ()), 2))
    assert [(each.size.ranks, each.repeat) for each in made] == [
        (1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2),
    ]  # fmt: skip
    assert [each.number for each in made] == [1, 2, 3, 4, 5, 6]


def test_one_rank_has_no_communication_to_tune() -> None:
    tried = (("bucket_cap_mb", ("1", "25")), ("num_workers", ("4",)))
    made = list(planned_runs(sizes((1,), (1, 2)), variants(tried, ("torch", "apex")), 1))
    assert [(each.size.ranks, each.variant.name) for each in made] == [
        (1, ""), (1, "apex"), (1, "num_workers=4"),
        (2, ""), (2, "apex"), (2, "bucket_cap_mb=1"), (2, "bucket_cap_mb=25"), (2, "num_workers=4"),
    ]  # fmt: skip


def test_sizes_of_several_nodes_are_ordered_by_ranks() -> None:
    assert [each.words for each in sizes((1, 2), (1, 2))] == [
        "1 rank", "2 ranks", "2 ranks on 2 nodes", "4 ranks on 2 nodes",
    ]  # fmt: skip


# -- one run


def test_warm_up_steps_do_not_count(tmp_path: Path) -> None:
    write_run(tmp_path, 2, steps(wait=16.0, waited=3.0))
    found = measure(RunReader(tmp_path).snapshot(), 5)
    assert found is not None
    assert (found.ranks, found.steps) == (2, 15)
    assert found.step == pytest.approx(0.080)
    assert found.data == pytest.approx(0.001)
    assert found.forward == pytest.approx(0.020)
    assert found.backward == pytest.approx(0.040)
    assert found.optimizer == pytest.approx(0.002)
    assert found.exposed == pytest.approx(0.016)
    assert found.core_wait == pytest.approx(0.003)
    assert found.rate == pytest.approx(2 * 8 / 0.080)
    assert found.gradient_bytes == 4_002_000


def test_a_wait_for_a_slower_rank_shows_in_the_backwards(tmp_path: Path) -> None:
    ranks = (steps(backward=40.0, forward=each, split=False) for each in (20.0, 50.0))
    fast, slow = (list(each) for each in ranks)
    for step in fast:
        # It has queued its forward sooner, and its backward ends with that of the slow rank.
        step["backward"] += slow[step["step"]]["total"] - step["total"]
        step["total"] = slow[step["step"]]["total"]
    write_run(tmp_path, 2, fast, slow=slow, device="cuda:0")
    found = measure(RunReader(tmp_path).snapshot(), 5)
    assert found is not None
    assert found.backward == pytest.approx(0.040)
    exposed = found.exposed or 0.0
    assert exposed == pytest.approx(0.030 / 2)  # The fast rank alone waits.
    assert found.compute + found.data + found.other + exposed == pytest.approx(found.step)


@pytest.mark.parametrize("how", ["no timers", "no DDP"])
def test_communication_that_nothing_timed_is_not_known(how: str, tmp_path: Path) -> None:
    write_run(tmp_path, 2, steps(wait=16.0, split=how != "no timers"), ddp=how != "no DDP")
    found = measure(RunReader(tmp_path).snapshot(), 5)
    assert found is not None
    assert found.exposed is None
    assert found.step == pytest.approx(0.080)


def test_a_gpu_times_few_steps_and_waits_for_no_core(tmp_path: Path) -> None:
    few = [
        {**step, "split": step["step"] in (6, 7, 8)}
        for step in steps(wait=16.0, waited=60.0, backward=40.0)
    ]
    write_run(tmp_path, 2, few, device="cuda:0")
    found = measure(RunReader(tmp_path).snapshot(), 5)
    assert found is not None
    assert (found.cpu, found.core_wait) == (False, None)
    assert found.exposed == pytest.approx(0.016)


def test_the_parts_add_up_where_the_steps_that_are_timed_are_long_ones(tmp_path: Path) -> None:
    short = steps(backward=6.0, split=False, forward=1.0)
    long = steps(backward=10.0, wait=30.0, forward=20.0)
    pairs = enumerate(zip(short, long, strict=True))
    mixed = [b if number in (8, 12, 16) else a for number, (a, b) in pairs]
    write_run(tmp_path, 2, mixed)
    found = measure(RunReader(tmp_path).snapshot(), 5)
    assert found is not None
    exposed = found.exposed or 0.0
    assert exposed == pytest.approx(0.75 * 0.006)
    assert found.backward == pytest.approx(0.25 * 0.006)
    assert found.compute + found.data + found.other + exposed == pytest.approx(found.step)


def test_the_median_repeat_stands_for_all() -> None:
    assert median_repeat([measured(other=each) for each in (0.5, 0.1, 0.3)]).other == 0.3


def test_a_run_that_crashed_is_diagnosed(tmp_path: Path) -> None:
    error = {
        "kind": "error", "time": T0, "pid": 1, "step": 8, "exception": "ValueError",
        "message": "bad batch", "path": "/job/train.py", "line": 7, "traceback": "",
    }  # fmt: skip
    write_run(tmp_path, 2, [*steps(count=8), error], status=1)
    found = judge_run(planned(2), tmp_path, tmp_path / "log", 1, 5)
    assert found.measured is None
    assert found.failure.startswith("crashed: DDP901 ")
    assert "ValueError: bad batch" in found.failure
    assert "(/job/train.py:7)" in found.failure


def test_a_run_without_findings_is_known_by_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("usage: train.py\ntrain.py: error: no such option\n\n")
    found = judge_run(planned(2), tmp_path / "gone", tmp_path / "log", 2, 5)
    assert found.failure == "failed with exit status 2: train.py: error: no such option"
    found = judge_run(planned(2), tmp_path / "gone", tmp_path / "no log", -9, 5)
    assert found.failure == "ended by SIGKILL"
    write_run(tmp_path / "run", 2, steps(), status=HANG, ended=False)
    found = judge_run(planned(2), tmp_path / "run", tmp_path / "log", HANG, 5)
    assert found.failure == "hung, and was ended"


def test_an_abort_while_torch_exits_costs_no_measurement(tmp_path: Path) -> None:
    write_run(tmp_path, 2, steps(), status=1)
    found = judge_run(planned(2), tmp_path, tmp_path / "log", 1, 5)
    assert found.measured is not None
    assert not found.failure


@pytest.mark.parametrize(
    ("count", "ranks", "message", "hint"),
    [
        (0, 2, "the job made no training steps", "optimizer.step()"),
        (4, 2, "the job made 4 steps (2 ranks), and the first 5 are", "--warmup N"),
        (0, 0, "no rank joined a process group", "init_process_group"),
    ],
)
def test_a_job_that_records_nothing_is_one_line(
    count: int, ranks: int, message: str, hint: str, tmp_path: Path
) -> None:
    write_run(tmp_path, ranks, steps(count=count))
    with pytest.raises(DoctorError) as raised:
        judge_run(planned(2), tmp_path, tmp_path / "log", 0, 5)
    assert message in raised.value.message
    assert hint in raised.value.hint
    assert raised.value.status == 2


def test_one_rank_may_do_without_a_process_group(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [])
    found = judge_run(planned(1), tmp_path, tmp_path / "log", 0, 5)
    assert "joins no process group with one rank" in found.failure


# -- all runs


def three_sizes() -> list[Outcome]:
    """Two repeats; the machine is slower in the second one."""
    made = []
    for repeat, slower in ((1, 1.0), (2, 1.5)):
        for ranks, exposed in ((1, 0.0), (2, 0.016), (4, 0.128)):
            parts = {"backward": 0.040 * slower, "forward": 0.020 * slower}
            result = measured(ranks, exposed=exposed * slower, **parts)
            made.append(outcome(planned(ranks, repeat), result))
    return made


def test_efficiency_is_against_one_rank_in_the_same_repeat() -> None:
    one, two, four = rows(three_sizes())
    assert one.is_base and not two.is_base
    assert one.efficiencies == (1.0, 1.0)
    assert two.efficiencies == pytest.approx((64 / 80, 94 / 118))
    assert four.efficiency == pytest.approx((64 / 192 + 94 / 286) / 2)
    assert two.spread is not None


def test_without_one_rank_the_smallest_size_is_what_others_are_compared_with() -> None:
    crashed = outcome(planned(1), None, failure="crashed: DDP901 x", status=1)
    made = [crashed, *(each for each in three_sizes() if each.planned.size.ranks > 1)]
    one, two, four = rows(made)
    assert one.failure is crashed
    assert two.is_base
    assert four.efficiency == pytest.approx((80 / 192 + 118 / 286) / 2)


def shown(made: list[Outcome], *, ascii_only: bool = True) -> list[str]:
    lines = list(table.table_lines(rows(made), ascii_only=ascii_only))
    assert all(len(line) <= 80 for line in lines)
    return lines


def test_the_table() -> None:
    lines = shown(three_sizes())
    assert lines[0].split() == [
        "ranks", "step", "data", "forward", "backward", "optim", "other", "exposed", "samples/s",
        "efficiency",
    ]  # fmt: skip
    assert lines[1].split() == [
        "1",
        "64.0",
        "1.00",
        "20.0",
        "40.0",
        "2.00",
        "1.00",
        "0",
        "125",
        "100%",
    ]
    assert lines[2].split() == [
        "2",
        "80.0",
        "1.00",
        "20.0",
        "40.0",
        "2.00",
        "1.00",
        "16.0",
        "200",
        "80%",
        "80-80",
    ]
    assert "4 ranks lose 67%: too small a batch" in " ".join(lines)
    assert any(line.startswith("  try ") and "--try accumulation=4" in line for line in lines)
    bars = [line for line in lines if "#" in line and "%" in line]
    assert [line.split()[0] for line in bars] == ["1", "2", "4"]
    assert bars[2].count("#") + bars[2].count(".") == 40
    assert "the repeats with 4 ranks differ by up to 49%" in " ".join(lines)


def test_a_size_that_failed_has_its_reason_in_the_table() -> None:
    made = three_sizes()
    made[1] = outcome(planned(2), None, failure="hung: DDP801 rank 1 left", status=HANG)
    del made[4]
    lines = shown(made)
    assert lines[2] == "    2  hung: DDP801 rank 1 left"
    assert "2 ranks: hung: DDP801 rank 1 left" in lines
    assert "  its output: /runs/001-ranks-2.log" in lines


def test_what_was_tried_is_judged_by_the_spread() -> None:
    made = three_sizes()
    for repeat, exposed in ((1, 0.002), (2, 0.003)):
        made.append(outcome(planned(2, repeat, TRIED), measured(2, exposed=exposed)))
    lines = shown(made)
    assert "bucket_cap_mb=1:" in lines
    said = " ".join(lines)
    assert "tried with 2 ranks: bucket_cap_mb=1 is" in said
    worse = [
        *three_sizes(),
        *(outcome(planned(2, n, TRIED), measured(2, exposed=0.2)) for n in (1, 2)),
    ]
    assert "nothing is faster than the script as it is" in " ".join(shown(worse))


def test_a_single_size_needs_no_bars() -> None:
    lines = shown([outcome(planned(1), measured())])
    assert lines[1].split()[-1] == "100%"
    assert not any("throughput" in line for line in lines)


def test_sizes_on_nodes_differ_by_name() -> None:
    made = [outcome(planned(1), measured()), outcome(planned(2), measured(2))]
    lines = shown([*made, outcome(planned(2, nodes=2), measured(2, exposed=0.03))])
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "2x1"]
    assert "2 nodes with 8 ranks each" in " ".join(lines)
    assert "2 ranks on 2 nodes lose 32%: communication" in " ".join(lines)


def test_bars_in_unicode() -> None:
    assert any("█" in line for line in shown(three_sizes(), ascii_only=False))


# -- why


BASE = measured()


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("none", {}, "as efficient as the smallest size"),
        ("data", {"data": 0.040}, "data loading: a rank waits 40.0 ms of 103 ms"),
        ("communication", {"exposed": 0.030}, "communication that nothing overlaps: 30.0 ms"),
        ("batch", {"exposed": 0.090}, "too small a batch: forward and backward take 60.0 ms"),
        ("cores", {"backward": 0.080}, "oversubscribed cores: a rank computes 1.6 times as long"),
        ("cores", {"exposed": 0.030, "core_wait": 0.025}, "a rank waits 25.0 ms of 94.0 ms for"),
        ("cores", {"backward": 0.080}, "although 2 ranks have 64 cores"),
        ("compute", {"backward": 0.080, "cpu": False}, "the computation itself takes 1.65 times"),
        (
            "communication",
            {"backward": 0.080, "cpu": False, "exposed": None},
            "communication within the backward pass",
        ),
        ("other", {"other": 0.050}, "code between the phases: 50.0 ms"),
    ],
)
def test_causes(
    name: str, changed: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_cores_here", lambda: 64)
    this = measured(2, **changed)
    found = table.cause(BASE, this, BASE.step / this.step)
    assert found.name == name
    assert words in found.words
    assert bool(found.tries) == (name != "none")


def test_more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_cores_here", lambda: 1)
    found = table.cause(BASE, measured(2, backward=0.080), 0.6)
    assert found.words.endswith("times as long as one alone, as 2 ranks share 1 core")


def test_strong_scaling_loses_by_too_small_a_batch() -> None:
    # A quarter of the samples, in half of the time.
    parts = {"forward": 0.010, "backward": 0.020, "data": 0.0005, "other": 0.0005}
    this = measured(4, samples=2.0, cpu=False, **parts)
    found = table.cause(BASE, this, (16 / 4) / this.step * BASE.step / 8)
    assert found.name == "batch"
    assert "2 samples a rank take 2.1 times their part of what 8 take" in found.words


def test_a_straggler_is_named_by_its_finding() -> None:
    this = measured(2, exposed=0.030)
    message = "rank 1 holds the others up by 30 ms a step, in its backward compute"
    straggler = Finding("DDP610", Severity.WARNING, message, (1,), fix="Look at its device.")
    found = table.cause(BASE, this, 0.6, [straggler])
    assert (found.name, found.words) == ("straggler", f"a straggler: {message}")
    assert found.tries == ("Look at its device.",)


def test_a_smallest_size_that_was_disturbed_is_no_measure() -> None:
    found = table.cause(measured(backward=0.9), measured(2), 3.0)
    assert "something else slowed down" in found.words


# -- charts, JSON, published figures


def with_variant() -> list[Row]:
    return rows([*three_sizes(), outcome(planned(2, 1, TRIED), measured(2, exposed=0.001))])


def test_the_chart_as_svg() -> None:
    root = ElementTree.fromstring(chart.chart_as_svg(chart.chart("a < b", with_variant())))
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "samples/s", "efficiency", "ideal", "as it is", "bucket_cap_mb=1"} <= {*texts}
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == 2 * (3 + 1)
    for each in circles:
        assert 0 < float(each.attrib["cx"]) < chart.WIDTH
        assert 0 < float(each.attrib["cy"]) < chart.HEIGHT


def test_the_chart_as_png(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is an extra")
    path = chart.check_plot_file(str(tmp_path / "a.png"))
    chart.write_chart(path, chart.chart("title", with_variant()))
    drawn = image.open(io.BytesIO(path.read_bytes()))
    assert drawn.size == (2 * chart.WIDTH, 2 * chart.HEIGHT)
    assert len(drawn.getcolors(1 << 20)) > 8


def test_a_chart_of_nothing_has_its_title() -> None:
    (label,) = chart.chart("title", [])
    assert label.text == "title"  # type: ignore[union-attr]


def test_json() -> None:
    facts = {"command": ["train.py"], "repeats": 2}
    found = json.loads(table.document(three_sizes(), facts, published=True))
    assert (found["format"], found["command"]) == (1, ["train.py"])
    one, two, four = found["rows"]
    assert (one["base"], two["ranks"], four["cause"]) == (True, 2, "batch")
    assert two["median"]["exposed"] == 0.016
    assert len(two["runs"]) == 2
    assert two["runs"][0]["measured"]["rate"] == pytest.approx(200.0)
    assert found["reference"]["figures"][1]["total"] == 433


def test_the_published_figures_stand_beside_what_was_measured() -> None:
    lines = table.reference_lines(rows(three_sizes()))
    assert all(len(line) <= 80 for line in lines)
    assert lines[3].split() == ["1", "torch", "371", "119", "252", "100%", "60.0", "100%"]
    assert lines[4].split()[:8] == ["2", "torch", "433", "134", "291", "86%", "76.0", "80%"]
    assert lines[5].split() == ["2", "apex", "423", "131", "291", "88%"]
    assert lines[-1].split() == ["8", "apex", "437", "131", "306", "85%"]
    assert "here" not in " ".join(table.reference_lines(()))


def test_a_size_has_its_words() -> None:
    assert Size(2, 4).words == "8 ranks on 2 nodes"
    assert planned(2, variant=TRIED).directory == "001-ranks-2-bucket_cap_mb=1"
