"""Ranks that train without DDP, and ranks that evaluate with statistics of their own."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.diagnose.data.draws import equal_losses
from ddpdoctor.diagnose.gradients.rules_unreduced import nothing_reduced, start_differs
from ddpdoctor.diagnose.loops.rules_evaluation import evaluation_differs
from ddpdoctor.diagnose.parity.rules import clipped_before_average
from ddpdoctor.run.records.base import JsonObject, encode
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.records.supervisor import JobRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.ring import RingWriter
from ddpdoctor.run.snapshot import Rank, Records, Run
from tests.diagnose.test_data_rules import drawn, evaluated, run_of, waiting
from tests.support.written import rank_records

Build = Callable[..., Run]


def trained(rank: int, steps: Iterable[int] = range(8), **facts: object) -> list[JsonObject]:
    """What a rank writes that trains alone."""
    return [
        {
            "kind": "solo", "step": step, "optimizer": "SGD", "shapes": [[4, 4]], "parameters": 1,
            "elements": 16, "hyper": [[0.1, 0, None, 0]], "calls": 0, "before": 0, "wide": 0,
            "outside": False, "gradients": [1.0 + rank + step], "values": [2.0 + rank * step],
            **facts,
        }
        for step in steps
    ]  # fmt: skip


SOLO_END: JsonObject = {"kind": "solo_end", "steps": 8, "wide": 0, "outside": False}


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def make(
        *ranks: list[JsonObject], collectives: Iterable[str] = (), status: int | None = 0
    ) -> Run:
        found = []
        for number, records in enumerate(ranks):
            path = tmp_path / f"{number}-{len(list(tmp_path.iterdir()))}"
            ring = RingWriter(str(path))
            group = ring.text("0|0-1")
            for order, name in enumerate(collectives, 1):
                ring.begin(1, order, (ring.text(name), group, 0, 0, 0), (1,), 1, -1, 0)
            opened = OpenRecord(format=1, rank=number, world_size=2)
            ended = any(each["kind"] == "solo_end" for each in records)
            every = rank_records(*([] if ended or status != 0 else [SOLO_END]), *records)
            found.append(Rank(number, 0, None, opened, records=every, ring_file=path))
        ends = Records() if status is None else Records([JobRecord(time=1, status=status)])
        return Run(tmp_path, {}, tuple(found), supervisor=ends, taken=10**12)

    return make


def said(run: Run) -> list[Finding]:
    return list(nothing_reduced(run))


def test_ranks_that_start_alike_and_exchange_nothing(build: Build) -> None:
    (finding,) = said(build(trained(0), trained(1)))
    assert (finding.code, finding.ranks, finding.severity) == ("DDP326", (0, 1), Severity.ERROR)
    assert "each rank trains its own model" in finding.message


@pytest.mark.parametrize(
    "other",
    [
        trained(1, hyper=[[0.2, 0, None, 0]]),
        trained(1, shapes=[[8, 2]]),
        trained(1, wide=3),
        trained(1, outside=True),
        trained(0),
        [*trained(1), {**SOLO_END, "wide": 5}],
        [*trained(1), {**SOLO_END, "outside": True}],
        [*trained(1), {**SOLO_END, "wrapped": True}],
        trained(1, optimizer="Adam"),
        trained(1, parameters=2),
        trained(1, elements=32),
        trained(1, range(3)),
        [*trained(1), {"kind": "ddp", "group_ranks": [0, 1]}],
        [*trained(1), {"kind": "data_parallel"}],
        [],
    ],
)
def test_ranks_that_differ_by_design_or_exchange_something(
    build: Build, other: list[JsonObject]
) -> None:
    assert said(build(trained(0), other)) == []


def averaged(rank: int, **facts: object) -> list[JsonObject]:
    """What a rank writes that averages gradients, but has weights of its own."""
    return [
        {**each, "gradients": [1.0 + step], "values": [2.0 + rank], "calls": step, "wide": step,
         **facts}
        for step, each in enumerate(trained(rank))
    ]  # fmt: skip


def test_averaged_gradients_of_different_weights(build: Build) -> None:
    (finding,) = start_differs(build(averaged(0), averaged(1)))
    assert (finding.code, finding.ranks, finding.severity) == ("DDP332", (0, 1), Severity.ERROR)
    assert finding.evidence == (
        "the gradients of SGD were equal on all ranks in 8 of 8 recorded steps",
        "the parameters differed before step 0, and still before step 7: norm 2 on rank 0, 3 on "
        "rank 1",
    )


@pytest.mark.parametrize(
    "other",
    [
        averaged(1, values=[2.0]),
        averaged(1, values=[2.0 + 1e-9]),
        averaged(1, gradients=[1.0]),
        averaged(1, outside=True),
        averaged(1, hyper=[[0.2, 0, None, 0]]),
        averaged(1)[:3],
        [{**averaged(1)[0], "values": [2.0]}, *averaged(1)[1:]],
        [*averaged(1), {"kind": "ddp", "group_ranks": [0, 1]}],
        [],
    ],
)
def test_weights_that_are_equal_or_may_be_made_so(build: Build, other: list[JsonObject]) -> None:
    assert not list(start_differs(build(averaged(0), other)))


def test_averaged_gradients_are_located_by_the_largest_sum(build: Build, tmp_path: Path) -> None:
    run = build(averaged(0), averaged(1))
    ring = RingWriter(str(tmp_path / "sums"))
    group = ring.text("0|0-1")
    for order, (line, numel) in enumerate([(9, 1), (20, 4000), (31, 1)], 1):
        name, kind, total = (ring.text(each) for each in ("all_reduce", "float32", "SUM"))
        texts = name, group, kind, total, ring.text(f"/job/t.py:{line}")
        ring.begin(1, order, texts, (numel,), numel, -1, 0)
    first, second = run.ranks
    run = replace(run, ranks=(replace(first, ring_file=tmp_path / "sums"), second))
    (finding,) = start_differs(run)
    assert str(finding.location) == "/job/t.py:20"


def test_gradients_that_are_all_zero_show_no_average(build: Build) -> None:
    assert not list(start_differs(build(*(averaged(n, gradients=[0.0]) for n in (0, 1)))))


def lost(offset: float = 0.0) -> tuple[bytes, ...]:
    """Steps whose loss rises now and then."""
    losses = [1.0 / (step + 1) + 0.1 * (step % 3) + offset for step in range(40)]
    steps = (StepRecord(step=step, loss=loss, total=9) for step, loss in enumerate(losses))
    return tuple(encode(each) for each in steps)


@pytest.mark.parametrize(
    ("other", "offset", "collectives", "ranks"),
    [
        (averaged(1), 0.0, ["all_reduce"] * 8, (0, 1)),
        (averaged(1), 0.1, ["all_reduce"] * 8, None),
        # The loss may be computed from what was gathered, or be reduced itself.
        (averaged(1), 0.0, ["all_reduce", "all_gather"] * 4, None),
        (averaged(1, calls=2), 0.0, ["all_reduce"] * 8, None),
        (averaged(1, wide=None), 0.0, ["all_reduce"] * 8, None),
        (trained(1), 0.0, [], None),
        ([], 0.0, ["all_reduce"] * 8, None),
    ],
)
def test_equal_losses_of_ranks_that_average_by_hand(
    build: Build,
    other: list[JsonObject],
    offset: float,
    collectives: list[str],
    ranks: tuple[int, ...] | None,
) -> None:
    run = build(averaged(0), other, collectives=collectives)
    lines = lost(), lost(offset)
    run = replace(
        run,
        ranks=tuple(replace(r, step_lines=each) for r, each in zip(run.ranks, lines, strict=True)),
    )
    found = equal_losses(run)
    assert (found and found.ranks) == ranks


def test_what_was_exchanged_after_the_last_look_has_to_be_known(build: Build) -> None:
    run = build(trained(0), trained(1))
    first, second = run.ranks
    assert said(run)
    unknown = Records(each for each in second.records if each.kind != "solo_end")
    assert not said(replace(run, ranks=(first, replace(second, records=unknown))))
    assert not said(
        replace(run, ranks=(first, replace(second, status=waiting(1)._replace(dropped=1))))
    )


def test_what_is_said_of_models_of_each_rank(build: Build) -> None:
    end = {"kind": "solo_end", "steps": 40, "wide": 0, "outside": False, "wrapped": False}
    shared = drawn(range(8), state="ended", sampler={"rank": 0, "num_replicas": 2})
    idle = {**shared, "idle": [["/job/train.py", 6]]}
    (finding,) = said(build([*trained(0), end, idle], [*trained(1), end, shared]))
    assert finding.message == (
        "each rank trains its own model: ranks 0 and 1 share a process group, and no gradient was "
        "reduced in 40 steps"
    )
    assert finding.evidence == (
        "the DistributedSampler built at /job/train.py:6 was passed to no loader",
        "the sampler built at /job/train.py:5 gives each rank its part of the data",
        "before step 0 the parameters were the same on all ranks",
        "gradients of SGD before step 7: norm 8 on rank 0, 9 on rank 1",
        "the parameters that belong to them: norm 2 on rank 0, 9 on rank 1",
        "no DistributedDataParallel was built, and no collective carried as much as a gradient",
    )


def test_four_looks_are_needed_and_norms_that_differ_by_more_than_rounding(build: Build) -> None:
    for steps, count in ((range(4), 1), (range(3), 0)):
        assert len(said(build(trained(0, steps), trained(1, steps)))) == count
    for by, count in ((2e-6, 1), (0.9e-6, 0)):
        near = [[{**each, "gradients": [500.0 + by * 500 * rank]} for each in trained(rank)]
                for rank in (0, 1)]  # fmt: skip
        assert len(said(build(*near))) == count


def test_gradients_that_differ_on_some_ranks_only_are_shared_by_the_others(build: Build) -> None:
    ranks = [trained(0), trained(1), trained(1)]
    run = build(*ranks)
    opened = [replace(rank.opened, world_size=3) for rank in run.ranks]
    ranks_of_three = tuple(
        replace(rank, opened=each) for rank, each in zip(run.ranks, opened, strict=True)
    )
    assert said(replace(run, ranks=ranks_of_three)) == []


def test_gradients_that_were_averaged_are_equal(build: Build) -> None:
    assert said(build(trained(0, gradients=[1.0]), trained(1, gradients=[1.0]))) == []
    # Averaged now and then, the models are equal now and then.
    meets = [[*trained(rank)[:5], *trained(rank, [5], values=[9.0]), *trained(rank, [6, 7])]
             for rank in (0, 1)]  # fmt: skip
    assert said(build(*meets)) == []


def test_trials_that_only_hand_in_their_results(build: Build) -> None:
    trials = [[{**each, "values": [2.5 + rank]} for each in trained(rank)] for rank in (0, 1)]
    assert said(build(*trials, collectives=["all_gather_object"])) == []
    (finding,) = said(build(*trials, collectives=["barrier"]))
    assert finding.severity == Severity.WARNING
    (finding,) = said(build(*trials, collectives=["all_reduce"]))
    assert finding.severity == Severity.ERROR


def test_a_file_for_each_rank_is_a_model_for_each(build: Build) -> None:
    ranks = [[*trained(rank), {"kind": "save", "file": f"model{rank}.pt"}] for rank in (0, 1)]
    assert said(build(*ranks)) == []


@pytest.mark.parametrize("status", [None, 1])
def test_a_job_that_goes_on_may_yet_average(build: Build, status: int | None) -> None:
    assert said(build(trained(0), trained(1), status=status)) == []
    long = [*range(8), *(1 << power for power in range(3, 11))]
    ranks = []
    for number in (0, 1):
        epochs: list[JsonObject] = [
            {"kind": "pass", "pass": each, "number": each, "path": "t.py", "line": 9, "marks": 9,
             "fetched": 9, "state": "ended" if each == 0 else "trains"}
            for each in (0, 1)
        ]  # fmt: skip
        ranks.append([*trained(number, long), *epochs])
    assert [each.code for each in said(build(*ranks, status=status))] == ["DDP326"]
    assert said(build(*(each[:-1] for each in ranks), status=status)) == []


# -- evaluation


def packed(value: float) -> list[object]:
    return [4, "f", base64.b64encode(struct.pack("<4f", *[value] * 4)).decode()]


def shard(rank: int, mean: float = 0, gathers: int = 0, reductions: int = 1) -> list[JsonObject]:
    _, part, _ = evaluated(rank, "x")
    part.update(collectives=1, gathers=gathers, reductions=reductions)
    statistics: JsonObject = {
        "kind": "statistics", "module": 0, "group": [0, 1], "armed": 13, "layers": 1,
        "names": ["norm"], "hashes": [f"{mean}", "1"], "samples": [packed(mean), packed(1.0)],
    }  # fmt: skip
    return [part, statistics]


@pytest.mark.parametrize(("gathers", "reductions"), [(2, 0), (0, 2), (1, 1)])
def test_results_meet_by_a_gather_as_by_a_reduction(gathers: int, reductions: int) -> None:
    ranks = (shard(rank, 0.2 * rank, gathers, reductions) for rank in (0, 1))
    (finding,) = evaluation_differs(run_of(*ranks))
    assert finding.evidence[-1].startswith("2 reductions and gathers")


def test_statistics_of_each_rank_make_several_models() -> None:
    (finding,) = evaluation_differs(run_of(shard(0), shard(1, 0.2)))
    assert (finding.code, finding.ranks, finding.severity) == ("DDP708", (0, 1), Severity.WARNING)
    assert "layer norm by 20.0%" in finding.evidence[0]


@pytest.mark.parametrize(
    "ranks",
    [
        [shard(0, 0.2), shard(1, 0.2)],
        [shard(0), shard(1, 0.001)],
        [shard(0), shard(1, 0.2)[:1]],
        [shard(0, reductions=0), shard(1, 0.2, reductions=0)],
        [shard(0), [{**shard(0)[0]}, shard(1, 0.2)[1]]],
        [shard(0)[1:], shard(1, 0.2)[1:]],
    ],
    ids=["equal", "near", "one rank", "not put together", "the same part", "no evaluation"],
)
def test_statistics_that_no_result_depends_on(ranks: list[list[JsonObject]]) -> None:
    assert list(evaluation_differs(run_of(*ranks))) == []


@pytest.mark.parametrize(
    ("norms", "said"),
    [
        (lambda rank, step: 1.0 + 0.3 * rank, True),
        (lambda rank, step: 1.0, False),
        (lambda rank, step: 1.0 + 0.3 * (rank and step < 3), False),
    ],
)
def test_gradients_that_are_clipped_before_the_job_averages_them(
    build: Build, norms: Callable[[int, int], float], said: bool
) -> None:
    def found(**facts: Callable[[int], JsonObject]) -> list[Finding]:
        records = [[CLIP, *averaged(rank)] for rank in (0, 1)]
        if (of := facts.get("gradients")) is not None:
            records = [[CLIP, *averaged(rank, **of(rank))] for rank in (0, 1)]
        if (of := facts.get("ddp")) is not None:
            records = [[*each, of(rank)] for rank, each in enumerate(records)]
        return list(clipped_before_average(with_norms(build(*records), norms)))

    places = [(str(each.location), each.ranks) for each in found()]
    assert places == [("/job/t.py:9", (0, 1))] * said
    assert not found(gradients=lambda rank: {"gradients": [1.0 + rank]})
    assert not found(ddp=lambda rank: {"kind": "ddp", "group_ranks": [0, 1]})


CLIP: JsonObject = {
    "kind": "clip", "step": 0, "call": "clip_grad_norm_", "path": "/job/t.py", "line": 9
}  # fmt: skip


def with_norms(run: Run, norms: Callable[[int, int], float]) -> Run:
    """Add steps whose clipping returned these norms, by rank and step."""
    ranks = []
    for rank in run.ranks:
        steps = (StepRecord(step=n, total=9, norm=norms(rank.rank, n)) for n in range(8))
        ranks.append(replace(rank, step_lines=tuple(encode(each) for each in steps)))
    return replace(run, ranks=tuple(ranks))
