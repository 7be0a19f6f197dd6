"""What a rank notes of a loss that is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ddpdoctor.probe.observers.ddp_modules import Replicas
from ddpdoctor.probe.observers.nonfinite import Losses
from ddpdoctor.run.records.base import JsonObject
from tests.support.probed import a_rank


class Module(nn.Module):
    """What a DDP module is to the probe."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("broken", [None, "0.weight", "1.weight", "1.bias"])
def test_whichever_parameter_took_it_the_loss_has_spread(broken: str | None) -> None:
    records: list[JsonObject] = []
    state = a_rank(records, skipped=())
    replicas, ddp = Replicas(state), Module()
    replicas.ddp_built(ddp)
    losses = Losses(state, replicas)
    losses._take(0, math.nan, None)
    if broken is not None:
        with torch.no_grad():
            ddp.module.get_parameter(broken).view(-1)[0] = math.nan
    state.tracker.steps = 1
    losses.step_ended(None, 0)
    (record,) = records
    assert record["kind"] == "nonfinite"
    assert record.get("spread", False) is (broken is not None)
