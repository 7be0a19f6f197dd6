"""What training on more ranks changes, on written runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.diagnose.parity.rules import compared
from ddpdoctor.diagnose.parity.training import Epoch, Point, Training, at, training_of
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import JsonObject
from tests.support.written import Written

BACKWARD = {"kind": "site", "phase": "backward", "path": "/job/train.py", "line": 7}


def trained(
    rows: Callable[[int], int], pull: Callable[[int], float], steps: int = 30
) -> Iterator[JsonObject]:
    """What a rank records of steps in which its loss counts so many predictions."""
    for step in range(steps):
        yield {
            "kind": "trained", "step": step, "rates": [0.1], "decays": [0.01], "samples": 8,
            "forwards": 1, "loss": 2.0 - 0.01 * step, "rows": rows(step), "pull": pull(step),
        }  # fmt: skip


def uneven(rank: int) -> Callable[[int], int]:
    return lambda step: 40 + 25 * ((step + rank) % 2) + rank


def found(written: Written) -> list[Finding]:
    return [each for each in written.findings(status=0) if each.code == "DDP337"]


def test_a_mean_over_own_tokens(written: Written) -> None:
    for rank in (0, 1):
        written.rank(rank, [BACKWARD, *trained(uneven(rank), lambda step: 1.9)])
    (finding,) = found(written)
    assert finding.ranks == (0, 1) and str(finding.location) == "/job/train.py:7"
    assert "weighs 1.6 times" in finding.message
    assert finding.evidence[0].startswith(
        "the ranks counted different numbers of predictions in 30"
    )


@pytest.mark.parametrize("kind", ["whole", "even", "rare", "nothing", "one"])
def test_nothing_is_said_of(written: Written, kind: str) -> None:
    def rows(rank: int) -> Callable[[int], int]:
        if kind == "even":
            return lambda step: 64
        if kind == "rare":
            return lambda step: 64 - 40 * (rank and step % 10 == 9)
        return uneven(rank)

    for rank in (0,) if kind == "one" else (0, 1):
        counted = rows(rank)
        pulls = (lambda step, n=counted: 0.02 * n(step)) if kind == "whole" else (lambda step: 1.9)
        records = trained(counted, pulls)
        if kind == "nothing":
            records = ({**each, "rows": None, "pull": None} for each in records)
        written.rank(rank, [BACKWARD, *records])
    assert found(written) == []


def test_what_a_run_trains_with(written: Written) -> None:
    written.world_size = 2
    for rank in (0, 1):
        written.rank(rank, list(trained(uneven(rank), lambda step: 1.9, 10 + rank)))
    written.findings()
    training = training_of(RunReader(written.path).snapshot())
    assert training is not None
    assert (training.ranks, training.steps, training.batch) == (2, 10, 16)
    assert training.rates[:2] == (Point(0, 0.1), Point(16, 0.1)) and training.decay == 0.01
    assert training.losses[-1].samples == 160
    assert training.losses[-1].value == pytest.approx(1.91)
    assert training.epoch is None


def test_a_rank_that_recorded_nothing(written: Written) -> None:
    written.world_size = 2
    written.rank(0, list(trained(uneven(0), lambda step: 1.9)))
    written.rank(1, [])
    written.findings()
    assert training_of(RunReader(written.path).snapshot()) is None


def training(ranks: int, rate: Callable[[int], float], steps: int = 60) -> Training:
    """A job with 8 samples a rank and step, whose rate is a function of the step."""
    batch = 8 * ranks
    return Training(
        ranks=ranks,
        steps=steps,
        batch=batch,
        rates=tuple(Point(batch * step, rate(step)) for step in range(steps)),
        by_step=tuple(rate(step) for step in range(steps)),
        decay=0.0,
        losses=(),
        epoch=Epoch(480, 480, 480 // batch, None),
        synchronized=True,
        stepped=None,
    )


def codes(base: Training, other: Training) -> list[str]:
    return [each.code for each in compared(base, other)]


def test_rates() -> None:
    constant = training(1, lambda step: 0.1, 120)
    assert codes(constant, training(2, lambda step: 0.1)) == ["DDP339"]
    assert codes(constant, training(2, lambda step: 0.2)) == []
    same = replace(training(2, lambda step: 0.1), batch=8.0)
    assert codes(constant, same) == []


def test_a_schedule_that_counts_steps() -> None:
    base = training(1, lambda step: 0.1 * 0.98**step, 120)
    assert codes(base, training(2, lambda step: 0.2 * 0.98**step)) == ["DDP331"]
    assert codes(base, training(2, lambda step: 0.2 * 0.98 ** (2 * step))) == []


@pytest.mark.parametrize(
    ("drawn", "expected"), [(960, "2 times the samples"), (240, "only 50% of"), (482, "")]
)
def test_an_epoch_with_other_samples(drawn: int, expected: str) -> None:
    other = replace(training(2, lambda step: 0.2), epoch=Epoch(480, drawn, drawn // 16, None))
    messages = [each.message for each in compared(training(1, lambda step: 0.1, 120), other)]
    assert len(messages) == bool(expected)
    assert all(expected in each for each in messages)


def test_a_value_after_some_samples() -> None:
    points = (Point(0, 1.0), Point(10, 2.0))
    assert [at(points, each) for each in (0, 9, 10, 11)] == [1.0, 1.0, 2.0, 2.0]
    assert at((), 5) is None
