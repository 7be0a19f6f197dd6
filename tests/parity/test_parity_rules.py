"""What training on more ranks changes, on written runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ddpdoctor.commands.parity import compared
from ddpdoctor.core.finding import Finding
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.parity import rows
from ddpdoctor.diagnose.parity.epochs import Epoch
from ddpdoctor.diagnose.parity.training import (
    Point,
    Schedule,
    Training,
    at,
    training_of,
)
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


EPOCHS = [
    ("for epoch in range(3):", True),
    ("for epoch in tqdm(range(1, args.epochs + 1)):", True),
    ("while step < 900:", False),
    ("for epoch in range(math.ceil(900 / len(loader))):", False),
    ("args.epochs = 900 // len(loader)\nfor epoch in range(args.epochs):", False),
    ("if loader:", False),
]


@pytest.mark.parametrize(("around", "repeated"), EPOCHS)
def test_an_epoch(written: Written, around: str, repeated: bool) -> None:
    written.world_size = 2
    script = written.path.parent / "train.py"
    script.write_text(f"{around}\n    for batch in loader:\n        step(batch)\n")
    for rank in (0, 1):
        made = {
            "kind": "pass", "pass": 0, "number": 0, "state": "ended", "path": str(script),
            "line": around.count("\n") + 2, "made": [str(script), 1], "length": 40,
            "followed": 40, "batches": 5, "fetched": 5, "marks": 5, "draws": 20, "armed": 0,
            "armed_after": 5, "hits": [*range(rank, 38, 2), 0], "falls": 8, "to_end": True,
        }  # fmt: skip
        steps = trained(uneven(rank), lambda step: 1.9, 8)
        written.rank(
            rank, [made, *({**each, "armed": int(str(each["step"])) + 1} for each in steps)]
        )
    written.findings()
    found = training_of(RunReader(written.path).snapshot())
    assert found is not None and found.epoch is not None
    epoch = found.epoch
    assert (epoch.length, epoch.steps, epoch.drawn, epoch.repeated) == (40, 5, 40, repeated)
    # Rank 1 drew sample 0, too, and 38 and 39 were left out.
    assert (epoch.missing, epoch.doubled, epoch.shuffled) == (2, 1, True)


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
        decay=0.0,
        losses=(),
        epoch=Epoch(480, 480 // batch, 480 // batch, 480, shuffled=True, repeated=True),
        normalized=None,
        stepped=None,
    )


def constant(ranks: int) -> Training:
    return training(ranks, lambda step: 0.1 * ranks, 120)


def codes(base: Training, other: Training) -> list[str]:
    return [each.code for each in compared(base, other)]


def test_rates() -> None:
    base = constant(1)
    assert codes(base, training(2, lambda step: 0.1)) == ["DDP339"]
    assert codes(base, training(2, lambda step: 0.2)) == []
    same = replace(training(2, lambda step: 0.1), batch=8.0)
    assert codes(base, same) == []


def test_a_rate_by_hand_that_counts_steps() -> None:
    base = training(1, lambda step: 0.1 * 0.98**step, 120)
    assert codes(base, training(2, lambda step: 0.2 * 0.98**step)) == ["DDP331"]
    assert codes(base, training(2, lambda step: 0.2 * 0.98 ** (2 * step))) == []
    # It is not known that the job trains for epochs.
    for epoch in (None, Epoch(480, 60, 60, 480)):
        other = training(2, lambda step: 0.2 * 0.98**step)
        assert codes(replace(base, epoch=epoch), replace(other, epoch=epoch)) == []


def scheduled(ranks: int, end: float | None, peak: float = 0.0) -> Training:
    """A job of 60 steps an epoch on one rank, with a schedule in steps."""
    half = None if end is None else (end + peak) / 2
    made = Location("/job/train.py", 5)
    schedule = Schedule("CosineAnnealingLR", made, 0.1 * ranks, peak, half or 90.0, end)
    return replace(constant(ranks), schedule=schedule)


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ((300, 0), (150, 0), ""),
        ((300, 30), (150, 15), ""),
        ((300, 0), (300, 0), "ends after 5 epochs with 1 rank, and after 10 with 2 ranks"),
        ((300, 0), (75, 0), "after 2.5 with 2 ranks: at 50% of the same epochs"),
        ((300, 60), (150, 60), "the warm-up takes 40% of the learning rate's schedule with 2"),
        ((300, 15), (150, 15), ""),
        ((None, 0), (None, 0), "halves the rate after 1.5 epochs"),
    ],
)
def test_a_schedule(
    one: tuple[float | None, float], two: tuple[float | None, float], expected: str
) -> None:
    found = list(compared(scheduled(1, *one), scheduled(2, *two)))
    assert [each.code for each in found] == ["DDP331"] * bool(expected)
    assert all(expected in each.message and each.location for each in found)
    # The larger size has trained to its end, which is that of the schedule.
    ended = replace(scheduled(2, *two), finished=True, steps=int(two[0] or 180))
    still = "warm-up" in expected or "halves" in expected
    assert codes(scheduled(1, *one), ended) == ["DDP331"] * still
    # A job that trains for a number of steps may count them.
    steps = [
        replace(scheduled(ranks, *each), epoch=Epoch(480, 60 // ranks, 60 // ranks, 480))
        for ranks, each in ((1, one), (2, two))
    ]
    assert codes(*steps) == []


def test_the_table() -> None:
    trainings = [
        replace(scheduled(ranks, 300, 30), decay=0.01, weights=1.0 + ranks, skipped=ranks - 1)
        for ranks in (1, 4)
    ]
    assert rows.head(trainings) == [
        ("", "1 rank", "4 ranks"),
        ("samples per optimizer step", "8", "32"),
        ("highest learning rate", "0.1", "0.4"),
    ]
    table = rows.body(trainings)
    assert table[1:] == [
        ("  by the square root", "0.1", "0.2"),
        ("learning rate at 952", "0.1", "0.4"),
        ("warm-up ends after", "30 steps", "30 steps"),
        ("", "240 samples", "960 samples"),
        ("", "0.5 epochs", "2 epochs"),
        ("schedule ends after", "300 steps", "300 steps"),
        ("", "2400 samples", "9600 samples"),
        ("", "5 epochs", "20 epochs"),
        ("weight decay per sample", "0.000125", "0.000125"),
        ("skipped steps", "0", "3"),
        ("optimizer steps per epoch", "60", "15"),
        ("samples per epoch", "480", "480"),
        ("initial weights", "the same", "others"),
    ]


def test_averaged_weights() -> None:
    def averaged(ranks: int, decay: float) -> Training:
        return replace(constant(ranks), averages=(1.0, *[decay] * 30))

    assert codes(averaged(1, 0.99), averaged(4, 0.99)) == ["DDP341"]
    assert codes(averaged(1, 0.99), averaged(4, 0.99**4)) == []
    assert codes(averaged(1, 0.99), constant(4)) == []
    (found,) = compared(averaged(1, 0.99), averaged(4, 0.99))
    assert found.fix.endswith("decay ** 4 is 0.960596.")


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [
        (Epoch(480, 60, 60, 960), "2 times the samples"),
        (Epoch(480, 60, 60, 960, apart=True), ""),
        (Epoch(480, 15, 15, 240), "only 50% of"),
        (Epoch(480, 30, 30, 482), ""),
        (Epoch(480, 29, 29, 472, missing=8, shuffled=True), ""),
        (Epoch(480, 6, 6, 420, missing=60, shuffled=True), "the last 60 of 480 samples"),
        (Epoch(480, 30, 30, 480, missing=96, doubled=96, shuffled=True), "drawn twice"),
        (Epoch(240, 30, 30, 480, doubled=240, shuffled=True), ""),
        (Epoch(240, 7, 7, 448, doubled=224, shuffled=True), "the last 32 of 480 samples"),
        (Epoch(480, 30, 30, 480, shuffled=False), "read the data in their order"),
        (Epoch(480, 30, 30, 480, shuffled=None), ""),
        (Epoch(480, 30, 30), ""),
    ],
)
def test_an_epoch_with_other_samples(epoch: Epoch, expected: str) -> None:
    messages = [each.message for each in compared(constant(1), replace(constant(2), epoch=epoch))]
    assert len(messages) == bool(expected)
    assert all(expected in each for each in messages)


@pytest.mark.parametrize(
    ("norms", "said"),
    [
        (lambda rank, step: (1.0 + 0.3 * rank, 0.5), True),
        (lambda rank, step: (1.0, 0.5), False),
        (lambda rank, step: (1.0 + 0.3 * rank, 0.5 + 0.1 * rank), False),
        (lambda rank, step: (1.0 + 0.3 * (rank and step < 9), 0.5), False),
    ],
)
def test_gradients_that_are_clipped_on_each_rank(
    written: Written, norms: Callable[[int, int], tuple[float, float]], said: bool
) -> None:
    written.world_size = 2
    clip = {"kind": "clip", "step": 0, "call": "clip_grad_norm_", "path": "/job/t.py", "line": 9}
    for rank in (0, 1):
        steps = [*trained(lambda step: 8, lambda step: 1.9)]
        for number, each in enumerate(steps):
            each["norm"], each["used"] = norms(rank, number)
        written.rank(rank, [clip, *steps])
    found = [each for each in written.findings(status=0) if each.code == "DDP342"]
    assert [str(each.location) for each in found] == ["/job/t.py:9"] * said


def test_a_value_after_some_samples() -> None:
    points = (Point(0, 1.0), Point(10, 2.0))
    assert [at(points, each) for each in (0, 9, 10, 11)] == [1.0, 1.0, 2.0, 2.0]
    assert at((), 5) is None
