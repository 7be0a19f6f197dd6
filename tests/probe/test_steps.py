"""Training loops of many kinds: steps, phases, samples, losses."""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.records.training import RandomRecord, StepRecord
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import PHASES
from tests.conftest import JOBS, Doctor, Result, marked

PAUSE = 40_000_000
"""Nanoseconds of the sleeps in ``jobs/loops.py``."""

LONG = 400_000_000
"""Nanoseconds of an evaluation in ``jobs/loops.py``."""

COUNTED = {
    "plain": 5,
    "accumulation_with_no_sync": 2,
    "accumulation_with_sync": 2,
    "accumulation_without_a_loader": 4,
    "without_a_loader": 5,
    "keyword_inputs": 4,
    "two_losses": 5,
    "two_optimizers": 5,
    "optimizer_state_made_for_a_checkpoint": 5,
    "optimizer_recreated": 5,
    "optimizer_recreated_with_a_scheduler": 15,
    "optimizer_in_an_optimizer": 5,
    "two_stages": 10,
    "lbfgs": 5,
    "reentrant_checkpoint": 5,
    "amp": 5,
    "amp_switched_off": 5,
    "epochs": 6,
    "loader_workers": 5,
    "spawned_loader_workers": 5,
    "dictionaries": 3,
    "evaluation_with_ddp": 10,
    "evaluation_with_the_module": 10,
    "evaluation_within_an_epoch": 5,
    "evaluation_within_an_epoch_cut_short": 5,
    "backward_fails_once": 6,
    "slow_data": 8,
    "slow_forward": 8,
    "slow_backward_of_rank_0": 8,
    "slow_optimizer": 8,
    "slow_other": 8,
    "slow_rank_0_before_a_barrier": 8,
    "slow_rank_0_before_an_asynchronous_collective": 8,
}
"""Loops with an optimizer, and how many steps they make."""

RARE = {
    "accumulation_without_a_loader",
    "keyword_inputs",
    "two_losses",
    "two_optimizers",
    "optimizer_state_made_for_a_checkpoint",
    "optimizer_recreated",
    "optimizer_recreated_with_a_scheduler",
    "optimizer_in_an_optimizer",
    "two_stages",
    "reentrant_checkpoint",
    "amp_switched_off",
    "spawned_loader_workers",
    "evaluation_within_an_epoch_cut_short",
    "backward_fails_once",
}
"""Loops of another job, whose tests are slow: only 128 steps of one are surely followed."""

FAILING = {"optimizer_fails_once": 5}
"""A job of its own: what it leaves behind would weigh on later loops."""

COUNTED_WITHOUT_OPTIMIZER = {
    "inference": 5,
    "inference_mode_without_a_loader": 5,
    "manual_descent": 5,
    # The fifth is ended by the end of the process, after the loop's window.
    "manual_descent_without_a_loader": 4,
}

EVEN = [4, 4, 4, 4, 2]


@dataclass
class Loops:
    """A finished ``jobs/loops.py``."""

    result: Result
    run: Run
    windows: list[list[dict[str, Any]]]
    """By rank: of each loop its name, beginning, end and losses."""
    others: Callable[[], Loops] | None = None
    """Run the job of the other loops, once."""

    def window(self, name: str, rank: int = 0) -> dict[str, Any]:
        return next(each for each in self._of(name).windows[rank] if each["name"] == name)

    def _of(self, name: str) -> Loops:
        known = any(each["name"] == name for each in self.windows[0])
        return self if known or self.others is None else self.others()

    def steps(self, name: str, rank: int = 0) -> list[StepRecord]:
        """The steps that ended within a loop."""
        window = self.window(name, rank)
        return [
            step
            for step in self._of(name).run.last[rank].steps
            if window["began"] <= step.start + step.total <= window["ended"]
        ]

    def times(self, name: str, phase: str, rank: int = 0) -> list[float]:
        """The time of a phase in each step of a loop, without its first one.

        A busy machine adds to any of them, and takes from a wait: a test asks for one among them.
        """
        return [getattr(step, phase) for step in self.steps(name, rank)[1:]]


def run_loops(directory: Path, names: list[str], ranks: int) -> Loops:
    token = uuid.uuid4().hex
    doctor = Doctor(directory, token)
    # Together they have more steps than are all followed closely at the default budget.
    result = doctor.run_to_its_end(
        "--overhead-budget=100",
        f"--nproc-per-node={ranks}",
        str(JOBS / "loops.py"),
        str(directory),
        *names,
    )
    result.check_success()
    assert not marked(token)
    windows = [
        json.loads((directory / f"windows-{rank}.json").read_text()) for rank in range(ranks)
    ]
    return Loops(result, result.run, windows)


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    @functools.cache
    def others() -> Loops:
        names = [name for name in COUNTED if name in RARE]
        return run_loops(tmp_path_factory.mktemp("others"), names, 2)

    names = [name for name in COUNTED if name not in RARE]
    found = run_loops(tmp_path_factory.mktemp("loops"), names, 2)
    found.others = others
    return found


@pytest.fixture(scope="module")
def failing_loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    return run_loops(tmp_path_factory.mktemp("failing"), list(FAILING), 2)


@pytest.fixture(scope="module")
def bare_loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """Loops of a job that never makes an optimizer."""
    return run_loops(tmp_path_factory.mktemp("bare"), list(COUNTED_WITHOUT_OPTIMIZER), 1)


def by_loop(*rows: Any) -> list[Any]:
    """Parameters that begin with the name of a loop. Those of rare loops are slow."""
    found = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        marks = pytest.mark.slow if values[0] in RARE else ()
        found.append(pytest.param(*values, id=values[0], marks=marks))
    return found


# -- how many


@pytest.mark.parametrize("name", by_loop(*COUNTED))
def test_steps_are_counted(loops: Loops, name: str) -> None:
    # Where one optimizer takes over from another that stays alive, its first step looks like the
    # second half of a cycle of two; one step may be missed there.
    wanted = {"two_stages": (9, 10)}.get(name, (COUNTED[name],))
    for rank in range(2):
        assert len(loops.steps(name, rank)) in wanted, f"rank {rank}"


@pytest.mark.parametrize("name", COUNTED_WITHOUT_OPTIMIZER)
@pytest.mark.slow
def test_without_an_optimizer_the_forward_counts(bare_loops: Loops, name: str) -> None:
    steps = bare_loops.steps(name)
    assert len(steps) == COUNTED_WITHOUT_OPTIMIZER[name]


@pytest.mark.slow
def test_no_step_is_lost_at_the_end_of_a_job_without_an_optimizer(bare_loops: Loops) -> None:
    # All of the loops' steps, and the one that ended with the process.
    assert len(bare_loops.run.last[0].steps) == sum(COUNTED_WITHOUT_OPTIMIZER.values()) + 1


def test_numbers_of_steps_have_no_gap(loops: Loops) -> None:
    for rank in loops.run.last:
        assert [step.step for step in rank.steps] == list(range(len(rank.steps)))
        assert rank.status is not None
        assert rank.status.step == len(rank.steps)
        assert rank.ended is not None
        assert rank.ended.steps == len(rank.steps)
        assert rank.ended.dropped == 0


def test_ranks_agree_on_the_number_of_steps_and_armed_forwards(loops: Loops) -> None:
    first, second = (rank.ended for rank in loops.run.last)
    assert first is not None
    assert second is not None
    assert (first.steps, first.armed) == (second.steps, second.armed)


@pytest.mark.slow
def test_no_hook_failed(loops: Loops, bare_loops: Loops) -> None:
    for run in (loops.run, bare_loops.run):
        assert [record for rank in run.ranks for record in rank.records.of(FaultRecord)] == []


def test_healthy_loops_have_no_findings(bare_loops: Loops) -> None:
    assert bare_loops.result.codes == []


# -- what a step says


def test_parts_add_up_to_the_total(loops: Loops, bare_loops: Loops) -> None:
    for run in (loops.run, bare_loops.run):
        for rank in run.ranks:
            for step in rank.steps:
                parts = [getattr(step, phase) for phase in PHASES] + [step.wait]
                assert sum(parts) == step.total > 0
                assert min(parts) >= 0


def test_steps_follow_each_other_in_time(loops: Loops) -> None:
    for rank in loops.run.last:
        for before, after in pairwise(rank.steps):
            gap = after.start - (before.start + before.total)
            # What lies between is what the step calls outside; the clocks may differ by little.
            assert abs(gap - after.outside) < 1_000_000


@pytest.mark.parametrize(
    ("name", "samples"),
    by_loop(
        ("plain", EVEN),
        ("accumulation_with_no_sync", [12, 10]),
        ("accumulation_with_sync", [12, 10]),
        ("accumulation_without_a_loader", [12] * 4),
        ("without_a_loader", [4] * 5),
        ("keyword_inputs", [4] * 4),
        ("two_optimizers", EVEN),
        ("lbfgs", EVEN),
        ("loader_workers", EVEN),
        ("spawned_loader_workers", EVEN),
        ("dictionaries", [4, 4, 2]),
        ("evaluation_with_ddp", EVEN * 2),
        ("evaluation_with_the_module", EVEN * 2),
        ("evaluation_within_an_epoch", EVEN),
        ("evaluation_within_an_epoch_cut_short", EVEN),
    ),
)
def test_samples(loops: Loops, name: str, samples: list[int]) -> None:
    assert [step.samples for step in loops.steps(name)] == samples


@pytest.mark.parametrize("name", ["inference", "manual_descent"])
def test_samples_without_an_optimizer(bare_loops: Loops, name: str) -> None:
    assert [step.samples for step in bare_loops.steps(name)] == EVEN


@pytest.mark.parametrize(
    "name",
    by_loop(
        "plain",
        "without_a_loader",
        "two_losses",
        "optimizer_recreated",
        "reentrant_checkpoint",
        "amp",
        "amp_switched_off",
        "loader_workers",
        "evaluation_with_ddp",
        "epochs",
    ),
)
def test_losses_are_those_of_the_job(loops: Loops, name: str) -> None:
    for rank in range(2):
        told = loops.window(name, rank)["losses"]
        assert [step.loss for step in loops.steps(name, rank)] == told


def test_the_loss_of_an_accumulated_step_is_its_last(loops: Loops) -> None:
    told = loops.window("accumulation_with_sync")["losses"]
    assert [step.loss for step in loops.steps("accumulation_with_sync")] == told[2::3]


@pytest.mark.parametrize(
    ("name", "backwards"),
    by_loop(
        ("plain", 1),
        ("accumulation_with_no_sync", 3),
        ("accumulation_with_sync", 3),
        ("accumulation_without_a_loader", 3),
        ("two_losses", 2),
        ("reentrant_checkpoint", 1),
        ("amp", 1),
        ("loader_workers", 1),
    ),
)
def test_backwards_are_counted(loops: Loops, name: str, backwards: int) -> None:
    # A record leaves the usual single backward out; a reader sees 0 there.
    assert {step.backwards or 1 for step in loops.steps(name)} == {backwards}


def test_lbfgs_calls_its_closure_several_times_a_step(loops: Loops) -> None:
    told = len(loops.window("lbfgs")["losses"])
    assert sum(step.backwards or 1 for step in loops.steps("lbfgs")) == told > 5


def test_only_the_overflown_step_is_skipped(loops: Loops) -> None:
    assert [step.skipped for step in loops.steps("amp")] == [False, False, True, False, False]
    assert not any(step.skipped for step in loops.steps("plain"))


def test_epochs_come_from_the_sampler(loops: Loops) -> None:
    assert [step.epoch for step in loops.steps("epochs")] == [3, 3, 4, 4, 5, 5]
    assert {step.epoch for step in loops.steps("plain")} == {None}


def test_no_epoch_outlives_its_loader(loops: Loops) -> None:
    """A loop whose sampler has no epoch comes after one that has; so does one without a loader."""
    assert {step.epoch for step in loops.steps("loader_workers")} == {None}


# -- evaluation weighs on no step


@pytest.mark.parametrize(
    "name",
    by_loop(
        "evaluation_with_ddp",
        "evaluation_with_the_module",
        "evaluation_within_an_epoch",
        "evaluation_within_an_epoch_cut_short",
    ),
)
def test_evaluation_weighs_on_no_step(loops: Loops, name: str) -> None:
    assert max(step.total for step in loops.steps(name)) < LONG / 2


def test_evaluation_between_epochs_is_outside(loops: Loops) -> None:
    for name in ("evaluation_with_ddp", "evaluation_with_the_module"):
        steps = loops.steps(name)
        assert steps[5].outside >= 0.8 * LONG
        assert max(step.outside for step in steps[1:5] + steps[6:]) < LONG / 2


# -- where time goes


@pytest.mark.parametrize(
    ("name", "phase"),
    by_loop(
        ("slow_data", "data"),
        ("slow_forward", "forward"),
        ("slow_optimizer", "optimizer"),
        ("slow_other", "other"),
        ("backward_fails_once", "other"),
    ),
)
def test_a_sleep_is_in_its_phase_and_no_other(loops: Loops, name: str, phase: str) -> None:
    for rank in range(2):
        times = {each: min(loops.times(name, each, rank)) for each in (*PHASES, "wait")}
        assert times.pop(phase) >= 0.8 * PAUSE
        assert max(times.values()) < 0.5 * PAUSE, times


@pytest.mark.slow
def test_an_optimizer_that_failed_is_left(failing_loops: Loops) -> None:
    """The job caught the error and went on: nothing after it belongs to the optimizer's phase."""
    name = "optimizer_fails_once"
    assert len(failing_loops.steps(name)) == FAILING[name]
    for step in failing_loops.steps(name)[2:]:
        assert step.other >= 0.8 * PAUSE
        assert step.optimizer < 0.5 * PAUSE


def test_a_slow_backward_is_its_own_rank_s_and_the_other_one_s_wait(loops: Loops) -> None:
    name = "slow_backward_of_rank_0"
    assert min(loops.times(name, "backward", 0)) >= 0.8 * PAUSE
    assert min(loops.times(name, "wait", 0)) < 0.5 * PAUSE
    assert min(loops.times(name, "backward", 1)) < 0.5 * PAUSE
    assert max(loops.times(name, "wait", 1)) >= 0.8 * PAUSE


@pytest.mark.parametrize(
    "name",
    ["slow_rank_0_before_a_barrier", "slow_rank_0_before_an_asynchronous_collective"],
)
def test_waiting_for_a_late_rank_is_wait(loops: Loops, name: str) -> None:
    assert min(loops.times(name, "other", 0)) >= 0.8 * PAUSE
    assert min(loops.times(name, "wait", 0)) < 0.5 * PAUSE
    assert max(loops.times(name, "wait", 1)) >= 0.8 * PAUSE
    assert min(loops.times(name, "other", 1)) < 0.5 * PAUSE


# -- who is a rank here, and how the model was wrapped


def test_loader_workers_are_no_ranks(loops: Loops) -> None:
    assert [rank.rank for rank in loops.run.ranks] == [0, 1]
    # Their generators of random numbers are recorded, and nothing else.
    assert {type(record) for record in loops.run.strays} <= {RandomRecord}
