"""Losses, gradients and parameters that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.probe.observers.fingerprints import packed
from ddpdoctor.run.records.base import JsonObject
from tests.support.replicas import SITE, found, prints, ranks, tensors
from tests.support.written import T0, Written


def nonfinite(step: int) -> JsonObject:
    return {"kind": "nonfinite", "time": T0, "step": step, "loss": "nan"}


BACKWARD = {**SITE, "phase": "backward", "line": 8}


def poisoned(step: int) -> list[JsonObject]:
    """Fingerprints of parameters that are not finite any more after a step."""
    bad: dict[str, Any] = {"detail": packed([0, 0], [1.0, float("nan")])}
    return [*prints("a" * step), *prints("bb", start=step, **bad)]


def test_the_rank_with_the_first_nan_is_named(written: Written) -> None:
    for rank, steps in enumerate(((4, 5), (3, 4))):
        written.rank(rank, [BACKWARD, tensors([0, 1]), *poisoned(3), *map(nonfinite, steps)])
    (finding,) = found(written, over=False)
    assert (finding.code, finding.ranks) == ("DDP706", (1,))


def test_a_nan_that_no_parameter_took_is_no_fault(written: Written) -> None:
    ranks(written, [*prints("aaaaaa")], [*prints("aaaaaa"), nonfinite(3)])
    assert found(written) == []


def test_who_was_first_is_open_until_all_have_written(written: Written) -> None:
    ranks(written, [*prints("a"), nonfinite(4), nonfinite(5)], [*prints("a")])
    assert found(written, over=False) == []


def test_a_gradient_that_overflowed_is_told_by_its_parameters(written: Written) -> None:
    bad: dict[str, Any] = {"detail": packed([0, 0], [1.0, float("inf")])}
    for rank in (0, 1):
        records = [*prints("aa"), *prints("b", start=2, **bad), nonfinite(3), nonfinite(4)]
        written.rank(rank, [BACKWARD, tensors([0, 1]), *records])
    (finding,) = found(written)
    assert finding.code == "DDP706"
    assert "second.weight is not finite after step 2" in finding.message


@pytest.mark.parametrize("spread", [False, True])
def test_a_nan_in_the_last_step_is_told_by_the_parameters(written: Written, spread: bool) -> None:
    ranks(written, [*prints("aaaaaa")], [*prints("aaaaaa"), {**nonfinite(7), "spread": spread}])
    assert [each.ranks for each in found(written)] == ([(1,)] if spread else [])


def test_where_a_loss_became_nan_is_told(written: Written) -> None:
    infinite = {"what": "operation", "operations": ["log"], "module": "fc", "within": False}
    origin = {"what": "operation", "operations": ["mul"], "module": "head", "within": True}
    mine = {**nonfinite(3), "origin": {**origin, "infinite": infinite}}
    written.rank(0, [BACKWARD, tensors([0, 1]), *poisoned(3)])
    written.rank(1, [BACKWARD, tensors([0, 1]), *poisoned(3), mine])
    (finding,) = found(written)
    assert finding.message.endswith("before any other rank's; it began behind module fc")
    assert finding.evidence[0].endswith("the first infinite value came out of log behind module fc")


@pytest.mark.parametrize(
    ("what", "said", "fix"),
    [
        ("input", "what enters log in module fc holds nan: a batch, or a constant", "normalized"),
        ("parameter", "a parameter in module fc is not finite when log uses it", "logarithms"),
        ("operation", "the first nan came out of log in module fc", "logarithms"),
    ],
)
def test_what_a_loss_became_nan_of_is_reported(
    written: Written, what: str, said: str, fix: str
) -> None:
    origin = {"what": what, "operations": ["log"], "module": "fc", "within": True}
    records = [BACKWARD, tensors([0, 1]), *poisoned(3)]
    written.rank(0, records)
    written.rank(1, [*records, {**nonfinite(3), "origin": origin}])
    (finding,) = found(written)
    assert finding.message.endswith("before any other rank's; it began in module fc")
    assert finding.evidence[0] == said
    assert fix in finding.fix


def test_lines_that_may_be_it_are_all_named(written: Written, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("loss = model(batch)\nloss = loss * a\nloss = loss * b\nloss.backward()\n")
    sites = [
        {**SITE, "path": str(script), "phase": phase, "line": line}
        for phase, line in (("forward", 1), ("backward", 4))
    ]
    origin = {"what": "input", "operations": ["mul"], "module": "head", "within": False}
    records = [*sites, tensors([0, 1]), *poisoned(3)]
    written.rank(0, [*records, {**nonfinite(3), "origin": origin}])
    written.rank(1, records)
    (finding,) = found(written)
    both = f"in `loss = loss * a` {script.name}:2 or in `loss = loss * b` {script.name}:3"
    assert finding.message.endswith(f"it began {both}")
    assert finding.evidence[0] == "either of these lines may be it"


def nonfinite_gradient(step: int) -> JsonObject:
    return {"kind": "nonfinite_gradient", "time": T0, "step": step, "names": ["first.bias"]}


def test_the_rank_whose_own_gradient_overflowed_is_named(written: Written) -> None:
    for rank, step in enumerate((4, 3)):
        records = [*poisoned(3), nonfinite_gradient(step), nonfinite(4), nonfinite(5)]
        written.rank(rank, [BACKWARD, tensors([0, 1]), *records])
    (finding,) = found(written)
    assert (finding.code, finding.ranks) == ("DDP706", (1,))
    assert "the gradient of first.bias on rank 1 is not finite at step 3" in finding.message


def test_what_did_no_harm_before_is_not_blamed(written: Written) -> None:
    """All ranks skipped rank 1's step 2; what lasts came from rank 0."""
    mine = [nonfinite_gradient(2), nonfinite(2), nonfinite(7), nonfinite(8)]
    theirs = [nonfinite_gradient(6), nonfinite(6), nonfinite(7), nonfinite(8)]
    for rank, records in enumerate((theirs, mine)):
        written.rank(rank, [BACKWARD, tensors([0, 1]), *poisoned(6), *records])
    (finding,) = found(written)
    assert finding.ranks == (0,)
    assert "the loss of rank 0 is nan at step 6" in finding.message


def test_steps_that_the_job_itself_skipped_are_no_fault(written: Written) -> None:
    bad = [nonfinite(step) for step in (2, 3, 4)]
    ranks(written, [*prints("aaaaaa"), *bad], [*prints("aaaaaa"), *bad])
    assert found(written) == []


def test_losses_that_stay_so_on_all_ranks_need_no_fingerprint(written: Written) -> None:
    """With a budget of 0 there is none."""
    for rank, first in enumerate((4, 3)):
        bad = [nonfinite(step) for step in range(first, 8)]
        written.rank(rank, [BACKWARD, tensors([0, 1]), *bad])
    (finding,) = found(written)
    assert finding.ranks == (1,)


def test_a_gradient_that_was_not_stepped_with_is_no_fault(written: Written) -> None:
    ranks(written, [*prints("aaaaaa")], [*prints("aaaaaa"), nonfinite_gradient(3)])
    assert found(written) == []
