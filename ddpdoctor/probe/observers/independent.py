"""Training without DDP: whether the ranks of a group still train one model.

Before some steps of the optimizer the norms of a few gradients and of their parameters are written
down; by comparing the ranks a rule sees whether anything was exchanged. Where DDP was built, other
observers watch.
"""

from __future__ import annotations

import sys
import time
import weakref
from dataclasses import replace
from typing import Any

from ddpdoctor.probe.observers import norms
from ddpdoctor.probe.observers.optimizers import options_of, parameters_of
from ddpdoctor.probe.observers.readback import when_ready
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.records.replicas import SoloEndRecord, SoloRecord

DENSE = 8
"""Steps at the beginning that are looked at one by one; later the powers of two."""

WITNESSES = 3
"""Parameters that are looked at."""

LARGEST = 1 << 20
"""Elements of a parameter that is looked at, if there are smaller ones than the larger."""


class Independent(Observer):
    """What a rank trains without DDP."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._begun = False
        self._last = -1
        """The last training step that was looked at."""
        self._before = 0
        """Calls that may have moved parameters before the first step."""
        self._outside = False
        """Whether parameters were changed between steps of the optimizer."""
        self._versions: list[tuple[weakref.ref[Any], int]] = []
        self._wrapped = False

    def ddp_built(self, ddp: Any) -> None:
        """From now on DDP has the say."""
        self._wrapped = True
        self.rest("step_begins", "step_ended")

    def step_begins(self, optimizer: Any) -> None:
        """Look at the gradients of some steps."""
        if self._wrapped:
            return
        ledger, budget = self.state.ledger, self.state.budget
        if not self._begun:
            self._begun = True
            self._before = ledger.wide if ledger is not None else 0
        for reference, version in self._versions:
            parameter = reference()
            if parameter is not None and parameter._version != version:
                self._outside = True
        self._versions = []
        number = self.state.tracker.steps
        if number == self._last or (number >= DENSE and number & (number - 1)):
            return
        if budget.left() < 0 or sys.modules["torch"].distributed.get_world_size() < 2:
            return
        self._last = number
        with budget.spending():
            self._look(optimizer, number)

    def _look(self, optimizer: Any, number: int) -> None:
        parameters = parameters_of(optimizer)
        reached = [each for each in parameters if norms.has_plain_gradient(each)]
        small = [each for each in reached if 0 < each.numel() <= LARGEST] or reached
        looked = sorted(small, key=lambda each: -each.numel())[:WITNESSES]
        read = norms.gradients_and_values(looked)
        if read is None:
            return
        ledger = self.state.ledger
        record = SoloRecord(
            time=time.time_ns(),
            step=number,
            optimizer=type(optimizer).__name__,
            shapes=tuple(tuple(each.shape) for each in looked),
            parameters=len(parameters),
            elements=sum(each.numel() for each in parameters),
            # Where it differs, the ranks are meant to.
            hyper=options_of(optimizer),
            calls=ledger.count if ledger is not None else None,
            before=self._before,
            wide=ledger.wide if ledger is not None else None,
            outside=self._outside,
        )

        def with_norms(values: list[float]) -> SoloRecord:
            return replace(record, gradients=tuple(values[::2]), values=tuple(values[1::2]))

        self.state.recorder.add(when_ready([read], with_norms))

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Remember the parameters as the step has left them."""
        if not self._begun or self._outside or self._wrapped:
            return
        first = next(iter(parameters_of(optimizer)), None)
        if first is not None:
            self._versions.append((weakref.ref(first), first._version))

    def rank_ends(self) -> None:
        """Record what was exchanged up to the end."""
        if self._last < 0:
            return
        ledger = self.state.ledger
        self.state.recorder.add(
            SoloEndRecord(
                time=time.time_ns(),
                steps=self.state.tracker.steps,
                wrapped=self._wrapped,
                calls=ledger.count if ledger is not None else None,
                wide=ledger.wide if ledger is not None else None,
                outside=self._outside,
            )
        )
