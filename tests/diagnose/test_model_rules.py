"""Rules on gradients, parameters and optimizers, on run directories that no small job stages."""

from __future__ import annotations

import pytest

from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.status import Phase
from tests.diagnose.test_rules import error
from tests.support.written import SECOND, T0, Written


def sighting(step: int, gradient: float, parameter: float, **more: object) -> JsonObject:
    return {
        "kind": "unreduced", "step": step, "ddp": 0, "cause": "around",
        "path": "/job/train.py", "line": 7,
        "gradients": {"weight": gradient}, "parameters": {"weight": parameter}, **more,
    }  # fmt: skip


def codes(written: Written, status: int | None = 0) -> list[str]:
    return [finding.code for finding in written.findings(status=status)]


def test_ranks_that_train_apart_are_told_with_their_norms(written: Written) -> None:
    written.rank(0, [sighting(0, 1.0, 5.0), sighting(1, 1.1, 5.1)])
    written.rank(1, [sighting(0, 2.0, 5.0), sighting(1, 2.2, 5.2)])
    (finding,) = written.findings(status=0)
    assert finding.code == "DDP301"
    assert finding.ranks == (0, 1)
    assert "1 on rank 0, 2 on rank 1" in finding.evidence[0]


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param([sighting(0, 1.0, 5.0), sighting(1, 1.1, 5.1)], id="averaged by hand"),
        pytest.param([sighting(0, 2.0, 5.0), sighting(1, 2.2, 5.1)], id="equal again"),
        pytest.param([sighting(0, 2.0, 5.0)], id="a single step"),
        pytest.param([sighting(0, float("nan"), 5.0), sighting(1, 1.1, 5.2)], id="not finite"),
        pytest.param([sighting(0, 2.0, 5.0, ddp=1), sighting(1, 2.2, 5.2, ddp=1)], id="another"),
        pytest.param([], id="one rank alone"),
    ],
)
def test_unreduced_gradients_that_did_no_harm_are_left_alone(
    written: Written, theirs: list[JsonObject]
) -> None:
    written.rank(0, [sighting(0, 1.0, 5.0), sighting(1, 1.1, 5.1)])
    written.rank(1, theirs)
    assert codes(written) == []


def test_local_sgd_is_left_alone(written: Written) -> None:
    """Parameters come apart and are averaged every fourth step."""
    for rank in (0, 1):
        apart = [0.1 * rank * (step % 4) for step in range(10)]
        written.rank(rank, [sighting(s, 1.0 + rank, 5.0 + apart[s]) for s in range(10)])
    assert codes(written) == []


@pytest.mark.parametrize(("seen", "expected"), [(("m", "m"), []), (("m", "n"), ["DDP301"])])
def test_parameters_that_are_averaged_between_sightings_are_left_alone(
    written: Written, seen: tuple[str, str], expected: list[str]
) -> None:
    for rank in (0, 1):
        norms = [sighting(s, 1.0 + rank, 5.0 + rank * s) for s in range(8)]
        mean = {"kind": "together", "step": 49, "module": 0, "armed": 0, "parameters": seen[rank]}
        written.rank(rank, [*norms, mean])
    assert codes(written) == expected


def test_replicas_of_different_groups_are_different_models(written: Written) -> None:
    for rank in (0, 1):
        alone: JsonObject = {"kind": "ddp", "device": "cpu", "group_ranks": [rank]}
        norms = [sighting(step, 1.0 + rank, 5.0 + rank * step, ddp=1) for step in range(4)]
        written.rank(rank, [alone, *norms])
    assert codes(written) == []


@pytest.mark.parametrize(("count", "expected"), [(6, []), (7, ["DDP301"])])
def test_a_job_that_runs_on_is_judged_when_it_is_certain(
    written: Written, count: int, expected: list[str]
) -> None:
    for rank in (0, 1):
        written.rank(rank, [sighting(s, 1.0 + rank, 5.0 + rank * s) for s in range(count)])
    assert codes(written, status=None) == expected


@pytest.mark.parametrize("role", ["optimizer", "scheduler"])
@pytest.mark.parametrize(
    ("every", "more", "at", "expected"),
    [
        ("step", "load", 8, ["DDP311"]),
        ("epoch", "", 0, ["DDP311"]),
        ("epoch", "load", 8, []),
        ("epoch", "together", 8, []),
        # Before the first of them, weights are loaded to begin with.
        ("epoch", "load", 4, ["DDP311"]),
        ("epoch", "gpu_load", 8, ["DDP311"]),
    ],
)
def test_an_optimizer_or_scheduler_that_is_made_again_by_epoch(
    written: Written, role: str, every: str, more: str, at: int, expected: list[str]
) -> None:
    remade = {
        "kind": "remade", "time": T0, "step": 16, "since": 4, role: "Adam", "times": 3,
        "every": every, "path": "/job/train.py", "line": 4,
    }  # fmt: skip
    for rank in (0, 1):
        written.rank(rank, [remade, *([{"kind": more, "step": at}] if more else [])])
    found = written.findings(status=0)
    assert [each.code for each in found] == expected
    assert all(every in each.message for each in found)


def test_a_scheduler_that_is_made_again_with_its_optimizer_is_one_fault(written: Written) -> None:
    remade: JsonObject = {"kind": "remade", "time": T0, "step": 16, "times": 3, "every": "epoch"}
    for rank in (0, 1):
        written.rank(rank, [{**remade, "scheduler": "StepLR"}, {**remade, "optimizer": "Adam"}])
    (finding,) = written.findings(status=0)
    assert finding.message.startswith("Adam is re-created")


def missing(why: str = "unused", step: int = 0) -> JsonObject:
    return {
        "kind": "no_gradient", "time": T0, "step": step, "ddp": 0, "iteration": 1,
        "parameters": [["head.weight", "Linear", why]], "count": 1, "of": 4,
        "path": "/job/train.py", "line": 5,
    }  # fmt: skip


def test_a_rank_that_may_still_tell_is_waited_for(written: Written) -> None:
    written.rank(0, [], phase=Phase.BACKWARD, since=1 << 62, steps=0)
    written.rank(1, [missing()], phase=Phase.OTHER, since=1 << 62, steps=1)
    assert codes(written, status=None) == []


@pytest.mark.parametrize(
    ("lines", "expected"), [([], []), ([{"kind": "step", "step": 0}], ["DDP305"])]
)
def test_what_a_rank_has_not_written_yet_is_waited_for(
    written: Written, lines: list[JsonObject], expected: list[str]
) -> None:
    """Its status page knows a step before its journal has what was missing in it."""
    written.rank(0, lines, phase=Phase.FORWARD, since=1 << 62, steps=2)
    written.rank(1, [missing()], phase=Phase.FORWARD, since=1 << 62, steps=2)
    assert codes(written, status=None) == expected


def test_the_rank_that_leaves_a_gradient_out_is_told_from_those_that_wait(
    written: Written,
) -> None:
    written.rank(0, [], phase=Phase.BACKWARD, steps=0)
    written.rank(1, [missing()], phase=Phase.OTHER, steps=1)
    (finding,) = [each for each in written.findings() if each.code == "DDP305"]
    assert finding.ranks == (1,)
    assert "on rank 1 only: head.weight (Linear)" in finding.message


UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one.\n"
    "Parameter indices which did not receive grad for rank 1: 2 3\n In addition"
)


def test_ddps_exception_is_the_cause_that_the_probe_did_not_see(written: Written) -> None:
    written.rank(0, [error("RuntimeError", "Connection closed by peer", T0 + SECOND)])
    written.rank(1, [error("RuntimeError", UNFINISHED, T0, step=40)])
    written.exit(1, 1, T0)
    written.exit(0, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks) == ("DDP305", (1,))
    assert "2 parameters got no gradient on rank 1 only: parameter 2" in finding.message


def test_frozen_parameters_are_another_fault_than_unused_ones(written: Written) -> None:
    for rank in (0, 1):
        written.rank(rank, [missing("frozen")])
    assert codes(written) == ["DDP303"]


def test_a_parameter_that_something_else_trains_needs_no_optimizer(written: Written) -> None:
    for rank in (0, 1):
        record = {"kind": "unowned", "ddp": 0, "parameters": ["w"], "count": 1, "of": 2}
        written.rank(rank, [{**record, "unchanged": False, "orphans": 1}])
    assert codes(written) == []


@pytest.mark.parametrize(("least", "expected"), [(2.0, ["DDP304"]), (1.0, [])])
def test_a_search_that_found_something_once_is_needed(
    written: Written, least: float, expected: list[str]
) -> None:
    record = {"kind": "find_unused", "ddp": 0, "iterations": 50, "parameters": 9}
    for rank in (0, 1):
        written.rank(rank, [{**record, "least": least}])
    assert codes(written) == expected


@pytest.mark.parametrize(
    ("samples", "count", "expected"), [(8, 10, ["DDP309"]), (9, 10, []), (8, 9, [])]
)
def test_only_a_small_batch_is_too_small_for_batch_norm(
    written: Written, samples: int, count: int, expected: list[str]
) -> None:
    layers: JsonObject = {"kind": "batchnorm", "ddp": 0, "layers": ["bn"], "count": 1}
    for rank in (0, 1):
        steps = [
            {"kind": "step", "step": n, "start": T0, "total": 1, "samples": samples}
            for n in range(count)
        ]
        written.rank(rank, [layers, *steps])
    assert codes(written) == expected
