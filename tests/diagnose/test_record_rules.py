"""Rules that report what a record says: the model, its optimizer, its launch and its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.launch.rules import data_parallel, local_rank_never_filled
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.status import Phase
from tests.diagnose.test_launch_rules import PARALLEL, PARSED, launched
from tests.diagnose.test_model_rules import missing, sighting
from tests.support.crash_records import HEAD, error
from tests.support.written import SECOND, T0, Written

LINE = Location("/job/train.py", 5)
AT: JsonObject = {"path": LINE.path, "line": LINE.line}


def both(written: Written, *records: JsonObject) -> Finding:
    """The only finding where both ranks wrote these."""
    for rank in (0, 1):
        written.rank(rank, records)
    (finding,) = written.findings(status=0)
    assert finding.ranks == (0, 1)
    return finding


# -- gradients that are not reduced


@pytest.mark.parametrize(
    ("cause", "code", "words"),
    [
        ("around", "DDP301", "this backward's forward bypassed DDP"),
        ("second backward", "DDP302", "this is a second backward after the one that DDP reduced"),
        ("forward in no_sync", "DDP308", "this backward's forward was inside no_sync()"),
        ("unfrozen", "DDP303", "weight was unfrozen after DDP was built here"),
        ("added", "DDP303", "weight was added after DDP was built here"),
        ("replaced", "DDP303", "weight was replaced after DDP was built here"),
    ],
)
def test_why_ranks_train_separate_models(
    written: Written, cause: str, code: str, words: str
) -> None:
    for rank in (0, 1):
        norms = [sighting(s, 1.0 + rank, 5.0 + rank * s, cause=cause) for s in range(3)]
        written.rank(rank, norms)
    (finding,) = written.findings(status=0)
    assert (finding.code, finding.ranks) == (code, (0, 1))
    assert f"ranks 0 and 1 train separate models: {words}" in finding.message
    assert finding.location == Location("/job/train.py", 7)
    assert finding.evidence == (
        "in step 0 the gradient of weight had the norm 1 on rank 0, 2 on rank 1 when the optimizer "
        "used it",
        "in step 1 the norms of the parameter weight differed by 1.7e-01 between ranks",
    )


@pytest.mark.parametrize(
    ("by", "expected"), [(2e-6, ["DDP301"]), (0.5e-6, [])], ids=["apart", "rounding"]
)
def test_norms_that_are_nearly_equal_were_averaged(
    written: Written, by: float, expected: list[str]
) -> None:
    for rank in (0, 1):
        written.rank(rank, [sighting(s, 1.0 - by * rank, 5.0 + rank * s) for s in range(3)])
    assert [each.code for each in written.findings(status=0)] == expected


def test_only_the_gradients_that_differ_are_named(written: Written) -> None:
    for rank in (0, 1):
        norms: list[JsonObject] = []
        for step in range(3):
            gradients = {"bias": 1.0 + rank, "weight": 1.0 + 2 * rank, "head": 3.0}
            parameters = {"bias": 2.0, "weight": 5.0 + rank * step, "head": 4.0}
            seen = sighting(step, 0, 0, cause="added")
            norms.append({**seen, "gradients": gradients, "parameters": parameters})
        written.rank(rank, norms)
    (finding,) = written.findings(status=0)
    assert "bias, weight were added" in finding.message
    assert "the gradient of weight had the norm 1 on rank 0, 3 on rank 1" in finding.evidence[0]


def test_a_no_sync_that_does_nothing(written: Written) -> None:
    finding = both(written, {"kind": "no_sync_vain", "step": 3, "ddp": 0, **AT})
    assert (finding.code, finding.severity, finding.location) == (
        "DDP308", Severity.WARNING, LINE,
    )  # fmt: skip
    assert finding.evidence[0].startswith("first in step 3: the forward had armed the all-reduce")


@pytest.mark.parametrize(("count", "words"), [(1, "1 parameter that"), (2, "2 parameters that")])
def test_parameters_that_were_changed_after_the_wrap(
    written: Written, count: int, words: str
) -> None:
    finding = both(written, {**missing("frozen"), "count": count})
    assert finding.code == "DDP303"
    assert finding.message.startswith(
        f"{words} DDP was built here to reduce {'was' if count == 1 else 'were'} frozen afterwards"
    )
    assert finding.evidence[0] == (
        f"no gradient reached {'it' if count == 1 else 'them'} in step 0"
    )


def test_parameters_without_a_gradient_on_any_rank(written: Written) -> None:
    finding = both(written, missing())
    assert finding.code == "DDP305"
    assert finding.message == (
        "1 of 4 parameters got no gradient on any rank: head.weight (Linear)"
    )
    assert finding.location == LINE
    assert finding.evidence[0] == (
        "no gradient reached them in the synchronized backward 1 (step 0)"
    )
    assert "freeze them before DDP is built" in finding.fix


# -- DDP's options and layers


def test_a_search_for_unused_parameters_that_finds_none(written: Written) -> None:
    record = {"kind": "find_unused", "ddp": 0, "iterations": 50, "parameters": 20, "least": 2.0}
    finding = both(written, record)
    assert (finding.code, finding.severity) == ("DDP304", Severity.INFO)
    assert finding.message == (
        "find_unused_parameters=True is not needed: in 50 synchronized backwards no rank left out "
        "any of 20 parameters"
    )
    assert finding.evidence[0].startswith("about 0.04 ms a step for the search")


def test_a_small_search_takes_a_hundredth_of_a_millisecond(written: Written) -> None:
    record = {"kind": "find_unused", "ddp": 0, "iterations": 50, "parameters": 2, "least": 2.0}
    assert both(written, record).evidence[0].startswith("about 0.01 ms a step")


def sized(samples: int, backwards: int = 1, count: int = 10) -> list[JsonObject]:
    return [
        {"kind": "step", "step": n, "start": T0, "total": 1, "samples": samples,
         "backwards": backwards}
        for n in range(count)
    ]  # fmt: skip


def test_batch_norm_of_small_batches(written: Written) -> None:
    layers = {"kind": "batchnorm", "ddp": 0, "layers": ["bn", "bn2"], "count": 2}
    finding = both(written, layers, *sized(8))
    assert (finding.code, finding.severity) == ("DDP309", Severity.INFO)
    assert finding.message == (
        "2 BatchNorm layers of this module take statistics from 8 samples on each rank alone"
    )
    assert finding.evidence == (
        "in training mode and no SyncBatchNorm: bn, bn2",
        "median batch: 8 on each of 2 ranks",
    )


def test_samples_of_a_step_come_in_its_backwards(written: Written) -> None:
    layer = {"kind": "batchnorm", "ddp": 0, "layers": ["bn"], "count": 1}
    finding = both(written, layer, *sized(16, backwards=2))
    assert "1 BatchNorm layer of this module takes statistics from 8 samples" in finding.message


@pytest.mark.parametrize("theirs", [sized(9), [], None], ids=["larger", "unknown", "frozen"])
def test_batch_norm_on_one_rank_alone_says_nothing(
    written: Written, theirs: list[JsonObject] | None
) -> None:
    layer: JsonObject = {"kind": "batchnorm", "ddp": 0, "layers": ["bn"], "count": 1}
    written.rank(0, [layer, *sized(8)])
    written.rank(1, sized(8) if theirs is None else [layer, *theirs])
    assert written.findings(status=0) == []


TWICE = "Expected to mark a variable ready only once. Parameter at index 1 with name w has been"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gradient_that_was_ready_twice(written: Written, reentrant: bool) -> None:
    raised = error("RuntimeError", TWICE, step=3)
    if reentrant:
        frame = '  File "/lib/torch/utils/checkpoint.py", line 9, in backward\n'
        raised["traceback"] = f"{HEAD}{frame}RuntimeError: {TWICE}\n"
    for rank in (0, 1):
        written.rank(rank, [raised])
        written.exit(rank, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks) == ("DDP323", (0, 1))
    assert "was ready twice in one backward on ranks 0 and 1" in finding.message
    assert finding.message.endswith("by activation checkpointing with use_reentrant=True") is (
        reentrant
    )
    assert finding.evidence[0].startswith("rank 0: DDP raised in step 3")


# -- optimizers


def unowned(**more: object) -> JsonObject:
    return {
        "kind": "unowned", "ddp": 0, "steps": [0, 7], "parameters": ["head.weight"], "count": 1,
        "of": 4, "orphans": 0, "optimizer": "SGD", "unchanged": True, **AT, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("orphans", "code", "severity", "words"),
    [
        (0, "DDP324", Severity.WARNING, "head.weight"),
        (1, "DDP325", Severity.ERROR, "this optimizer holds 1 parameter that the model no longer"),
        (2, "DDP325", Severity.ERROR, "this optimizer holds 2 parameters that the model no longer"),
    ],
)
def test_parameters_that_no_optimizer_holds(
    written: Written, orphans: int, code: str, severity: Severity, words: str
) -> None:
    finding = both(written, unowned(orphans=orphans))
    assert (finding.code, finding.severity, finding.location) == (code, severity, LINE)
    assert words in finding.message
    verb = "is" if orphans == 1 else "are"
    last = f"never got a gradient and {verb} in no DDP module"
    assert finding.evidence[-1].endswith(last) is bool(orphans)


def test_parameters_that_change_all_the_same_are_in_some_optimizer(written: Written) -> None:
    for rank in (0, 1):
        written.rank(rank, [unowned(unchanged=False)])
    assert written.findings(status=0) == []


def unzeroed(**more: object) -> JsonObject:
    return {
        "kind": "unzeroed", "optimizer": "SGD", "step": 9, "carried": 8, "after": [2.5, 1.0],
        "before": [2.5, 1.0], "edited": [3.0], **AT, **more,
    }  # fmt: skip


def test_gradients_that_are_carried_from_step_to_step(written: Written) -> None:
    finding = both(written, unzeroed())
    assert (finding.code, finding.severity, finding.location) == ("DDP312", Severity.ERROR, LINE)
    assert finding.evidence[0].startswith("8 steps in a row by step 9 whose gradients")
    assert finding.evidence[1].startswith("the norm of one of them is 2.5 when a step ends")


@pytest.mark.parametrize(
    "change",
    [
        {"after": [], "before": []},
        {"before": [2.5, 1.1]},
        {"after": [0.0], "before": [0.0]},
        {"edited": [0.0]},
    ],
    ids=["none", "changed", "zero", "zeroed in between"],
)
def test_gradients_that_are_not_carried(written: Written, change: JsonObject) -> None:
    written.rank(0, [unzeroed()])
    written.rank(1, [unzeroed(**change)])
    assert written.findings(status=0) == []


# -- how the job was launched


def test_a_local_rank_that_torchrun_never_filled() -> None:
    used = {**PARSED, "used": ["/job/train.py", 8]}
    (finding,) = local_rank_never_filled(launched([used], [PARSED], over=True))
    assert finding.message.startswith("ranks 0 and 1 parsed local rank 0: torchrun fills")
    assert (finding.severity, finding.location) == (
        Severity.WARNING, Location("/job/train.py", 3),
    )  # fmt: skip
    assert finding.evidence == (
        "rank 0: args.local_rank is 0, LOCAL_RANK is 1",
        "rank 1: args.local_rank is 0, LOCAL_RANK is 1",
        "the script uses it at /job/train.py:8",
    )


def test_data_parallel_in_a_job_of_several_processes() -> None:
    (finding,) = data_parallel(launched([PARALLEL], [PARALLEL], over=True))
    assert finding.message.startswith("nn.DataParallel in a job of 2 processes")
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (0, 1))
    assert finding.evidence == ("built on 2 ranks; none of them built a DDP",)


def test_data_parallel_beside_ddp_or_in_one_process_is_left_alone() -> None:
    ddp: JsonObject = {"kind": "ddp", "group_ranks": [0, 1]}
    assert list(data_parallel(launched([PARALLEL, ddp], over=True))) == []
    assert list(data_parallel(launched([PARALLEL], over=True))) == []
    (finding,) = data_parallel(launched([PARALLEL, ddp], [PARALLEL], over=True))
    assert finding.ranks == (1,)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    run = launched([PARSED], [{"kind": "end", "time": 1}], step=(5, 0))
    first, other = run.ranks[0], replace(run.ranks[1], step_lines=())
    (finding,) = local_rank_never_filled(replace(run, ranks=(first, other)))
    assert finding.ranks == (0,)
    # One that has not come yet may have the same option.
    assert list(local_rank_never_filled(replace(run, ranks=(first,)))) == []


# -- how a rank ended


@pytest.mark.parametrize(
    ("oom", "words", "source"),
    [
        ("kernel", "was killed by the out-of-memory", "the kernel's log names this process"),
        ("cgroup", "was very likely killed by the out-of-memory", "the memory cgroup counted"),
    ],
)
def test_a_rank_that_the_out_of_memory_killer_ended(
    written: Written, oom: str, words: str, source: str
) -> None:
    written.rank(0, [], phase=Phase.WAIT)
    written.rank(1, [], phase=Phase.FORWARD)
    written.exit(1, -9, T0)
    written.supervisor[-1]["oom"] = oom
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks) == ("DDP903", (1,))
    assert words in finding.message
    assert finding.evidence[0].startswith(source)


@pytest.mark.parametrize(
    ("status", "code"),
    [(-9, "DDP902"), (-11, "DDP904"), (-7, "DDP904"), (-6, "DDP904"), (-8, "DDP904"),
     (-4, "DDP904"), (-10, "DDP902"), (3, "DDP905")],
)  # fmt: skip
def test_how_a_rank_ended_says_which_rule_names_it(
    written: Written, status: int, code: str
) -> None:
    written.rank(0, [], phase=Phase.WAIT)
    written.rank(1, [], phase=Phase.FORWARD)
    written.exit(1, status, T0)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks) == (code, (1,))


FAULT = """\
Fatal Python error: Segmentation fault

Thread 0x1 (most recent call first):
  File "/job/other.py", line 3 in wait

Current thread 0x2 (most recent call first):
  File "/lib/python3.11/site-packages/torch/nn/functional.py", line 9 in linear
  File "/job/train.py", line 12 in step
  File "/job/train.py", line 40 in <module>

Extension modules: numpy
"""


def test_a_crash_in_native_code_is_at_the_line_that_entered_it(written: Written) -> None:
    written.rank(0, [], phase=Phase.WAIT)
    written.rank(1, [], phase=Phase.FORWARD)
    (written.path / "rank-0001.r0.fault").write_text(f"noise\n{FAULT}")
    written.exit(1, -11, T0)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.location) == ("DDP904", Location("/job/train.py", 12))
    assert finding.traceback.startswith("Fatal Python error")


def test_an_abort_behind_the_end_of_the_script_does_no_harm(written: Written) -> None:
    end: JsonObject = {"kind": "end", "time": T0, "steps": 4, "armed": 4}
    for rank in (0, 1):
        written.rank(rank, [end], armed=4, steps=4)
        written.exit(rank, -6 if rank else 0, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks, finding.severity) == ("DDP906", (1,), Severity.INFO)


def test_what_other_ranks_failed_of_is_shown_beside_the_cause(written: Written) -> None:
    lost = "[pair.cc:1] Connection closed by peer [10.0.0.1]:1"
    written.rank(0, [error("ValueError", "bad", T0)])
    for rank in range(1, 6):
        own = rank == 5
        words = (
            error("KeyError", "'x'", T0 + 2 * SECOND)
            if own
            else error("RuntimeError", lost, T0 + rank * SECOND)
        )
        written.rank(rank, [words])
    for rank in range(6):
        written.exit(rank, 1, T0 + 9 * SECOND)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks) == ("DDP901", (0,))
    assert finding.evidence[0].startswith("rank 1 failed 1.0 s later, as a consequence: Runtime")
    assert finding.evidence[-1] == "2 more ranks failed after it"
    assert len(finding.evidence) == 4


def test_where_a_rank_was_that_left_no_line(written: Written, tmp_path: Path) -> None:
    site: Any = {"kind": "site", "phase": "forward", "path": "/job/train.py", "line": 7}
    written.rank(0, [], phase=Phase.WAIT)
    written.rank(1, [site], phase=Phase.FORWARD, site="/job/train.py:7")
    written.exit(1, -9, T0)
    (finding,) = written.findings(status=1)
    assert finding.message.endswith("was killed by SIGKILL in step 0, forward")
    assert finding.location == Location("/job/train.py", 7)
