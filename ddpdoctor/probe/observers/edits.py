"""Gradients that the job changes between backward and the optimizer's step.

What all ranks do alike is no fault: a rank only writes when it begins or ceases to do so, and a
rule compares. Calls of torch's clipping are seen in every step; that they have ceased is noticed
later, but written with the step. Whatever else changes a gradient is seen by its counter of
versions, in the steps that all ranks look at.
"""

from __future__ import annotations

from types import CodeType, FrameType
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
        """What clipped last, if it has not ceased to."""
        self._clipped = -1
        """The step in which it did."""
        self._from: tuple[str, CodeType | None, int] = ("", None, 0)
        """Its name, and the instruction that called it."""
        self._last_count: dict[int, int] = {}
        """How many gradients were changed in the last step that was looked at, by DDP module."""
        self._marks: list[tuple[Replica, list[tuple[int, Mark]]]] = []

    def clips(self, name: str, frame: FrameType) -> None:
        """Remember the outermost call of a step: torch's functions call each other."""
        step = self.state.tracker.steps
        if self._clipped == step:
            return
        called = (name, frame.f_code, frame.f_lasti)
        if called != self._from or self._clipped != step - 1:
            self._ceased(step - 1)
            self._from = called
            call = name, sites.caller()
            if call != self._call:
                self._call = call
                self.state.add(ClipRecord(step=step, call=name, **call[1].place), MOST)
        self._clipped = step

    def _ceased(self, last: int) -> None:
        """If nothing clipped from some step on up to a last one, write the first of them."""
        if self._call is not _NO_CALL and self._clipped < last:
            self._call = _NO_CALL
            self.state.add(ClipRecord(step=self._clipped + 1, **NOWHERE.place), MOST)

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
        self._ceased(step)
        if not self._marks:
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

    def rank_ends(self) -> None:
        """What has ceased since the last look was not written yet."""
        self._ceased(self.state.tracker.steps - 1)
