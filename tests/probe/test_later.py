"""Losses and gradients that are read some steps after their graph is gone, as a GPU's are."""

from __future__ import annotations

import pytest
import torch

from ddpdoctor.run.records.model import NonfiniteGradientRecord, NonfiniteRecord
from ddpdoctor.run.records.process import FaultRecord
from tests.conftest import ROOT, Doctor
from tests.support.marks import sick

LATER = str(ROOT / "tests" / "jobs" / "later.py")


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"),
    reason="this torch does not tell whether a saved tensor has hooks: nothing is looked at",
)
def test_the_operation_and_the_module_are_told_of_a_loss(doctor: Doctor) -> None:
    job = str(sick("ddp706_entropy_of_certainty"))
    result = doctor.run("--nproc-per-node", "2", "--overhead-budget", "50", LATER, job)
    result.check_success()
    (told,) = result.run.ranks[1].records.of(NonfiniteRecord)
    assert told.step == 23
    source = told.origin and told.origin.infinite
    assert source is not None
    assert (source.operations, source.module) == (("log",), "scores")
    assert not [
        *result.run.ranks[0].records.of(NonfiniteRecord),
        *result.run.ranks[0].records.of(FaultRecord),
    ]


@pytest.mark.slow
def test_the_parameters_are_told_of_a_gradient(doctor: Doctor) -> None:
    job = str(sick("ddp706_norm_of_nothing"))
    result = doctor.run("--nproc-per-node", "2", "--overhead-budget", "50", LATER, job)
    assert result.codes == ["DDP706"]
    said = " ".join(result.ours.split())
    assert "the gradient of encoder.2.bias on rank 1 is not finite at step 3" in said
    told = result.run.ranks[1].records.of(NonfiniteGradientRecord)[0]
    assert told.step == 3
    assert told.names == ("encoder.2.bias", "encoder.2.weight", "encoder.0.bias")


@pytest.mark.slow
def test_where_sizes_cannot_be_had_the_rank_and_the_step_are_told(doctor: Doctor) -> None:
    job = str(sick("ddp706_norm_of_nothing"))
    result = doctor.run("--nproc-per-node", "2", "--overhead-budget", "50", LATER, "--broken", job)
    result.check_success()
    assert result.codes == ["DDP706"]
    assert "on rank 1 is not finite at step 3" in " ".join(result.ours.split())
    for rank in result.run.ranks:
        faults = {str(each.hook).rpartition(".")[2] for each in rank.records.of(FaultRecord)}
        assert faults == {"_look_into", "search"}
