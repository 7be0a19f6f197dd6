"""Gradients that the job changes between backward and the optimizer's step.

What all ranks do alike is no fault: a rank only writes when it begins or ceases to do so, and a
rule compares. Calls of torch's clipping are seen in every step. Whatever else changes a gradient is
seen by its counter of versions, in the steps that all ranks look at.
"""

from __future__ import annotations

from typing import Any

from ddpdoctor.probe.observers.replicas import Mark, Replica, Replicas
from ddpdoctor.probe.runtime import sites
from ddpdoctor.probe.runtime.events import Observer, before_step
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import NOWHERE, Site
from ddpdoctor.run.records.model import ClipRecord, EditRecord

LOOKS = 64
"""Steps at the beginning whose gradients are looked at; later each so many."""

MOST = 128
"""Records of each kind that one rank writes."""

NAMED = 4
"""Parameters that a record names."""

_NO_CALL = ("", NOWHERE)


class Edits(Observer):
    """Changes of the gradients of a rank."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._call: tuple[str, Site] = _NO_CALL
        """What clipped in this step."""
        self._last_call = _NO_CALL
        self._last_count: dict[int, int] = {}
        """How many gradients were changed in the last step that was looked at, by DDP module."""
        self._marks: list[tuple[Replica, list[tuple[int, Mark]]]] = []

    def clips(self, name: str) -> None:
        """Remember the outermost call: torch's functions call each other."""
        if self._call is _NO_CALL:
            self._call = name, sites.caller()
            self.wake("step_begins")

    def backward_ended(self) -> None:
        """Remember the gradients as the backward left them."""
        step = self.state.tracker.steps
        if step < LOOKS or not step % LOOKS:
            self._marks = [(each, each.take_marks(each.witnesses)) for each in self._replicas.alive]
            self.wake("step_begins")
            return
        self._marks = []
        self.rest("backward_ended")
        before_step(step - step % LOOKS + LOOKS, lambda: self.wake("backward_ended"))

    def step_begins(self, optimizer: Any) -> None:
        """See which are other ones now."""
        step = self.state.tracker.steps
        call, self._call = self._call, _NO_CALL
        if call != self._last_call:
            self._last_call = call
            self.state.add(ClipRecord(step=step, call=call[0], **call[1].place), MOST)
        if not self._marks:
            if call is _NO_CALL:
                self.rest("step_begins")
            return
        marked, self._marks = self._marks, []
        for each, marks in marked:
            changed = each.changed(marks)
            if len(changed) != self._last_count.get(each.number, 0):
                self._last_count[each.number] = len(changed)
                names = tuple(each.names[index] for index in changed[:NAMED])
                record = EditRecord(step=step, ddp=each.number, count=len(changed), names=names)
                self.state.add(record, MOST)
