"""Gradients that the job changes between backward and the optimizer's step.

What all ranks do alike is no fault: a rank only writes when it begins or ceases to do so, and a
rule compares. Calls of torch's clipping are seen in every step. Whatever else changes a gradient is
seen by its counter of versions, in the steps that all ranks look at.
"""

from __future__ import annotations

from typing import Any

from ddpdoctor.probe.observers.replicas import Mark, Watched, watched
from ddpdoctor.probe.runtime import events, rank, shield
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.records.base import JsonObject

LOOKS = 64
"""Steps at the beginning whose gradients are looked at; later each so many."""

MOST = 256
"""Records that one rank writes."""

NAMED = 4
"""Parameters that a record names."""

_call: tuple[str, Site] | None = None
"""The call that clipped in this step."""
_last_call: tuple[str, Site] | None = None
_last_count: dict[int, int] = {}
"""How many gradients were changed in the last step that was looked at, by DDP module."""
_marks: list[tuple[Watched, list[tuple[int, Mark]]]] = []
_told = 0


def forget() -> None:
    """In a forked child: nothing was written yet."""
    global _call, _last_call, _told
    _call, _last_call, _told = None, None, 0
    _last_count.clear()
    _marks.clear()


def called(name: str, site: Site) -> None:
    """A function that clips gradients is called."""
    global _call
    # What torch's own functions call within is the same clipping.
    if _call is None:
        _call = name, site


def backward_ended() -> None:
    """Remember the gradients as the backward left them."""
    state = rank.current()
    if state is None:
        return
    step = state.tracker.steps
    if step < LOOKS or not step % LOOKS:
        _marks[:] = [(each, each.take_marks(each.witnesses)) for each in watched]
    elif _marks:
        _marks.clear()


def step_begins(optimizer: Any) -> None:
    """See which are other ones now."""
    global _call, _last_call
    call, _call = _call, None
    if call != _last_call:
        _last_call = call
        name, site = call or ("", None)
        _tell({"kind": "clip", "call": name, **_place(site)})
    if not _marks:
        return
    for each, marks in _marks:
        changed = each.changed(marks)
        if len(changed) != _last_count.get(each.number, 0):
            _last_count[each.number] = len(changed)
            names = [each.names[index] for index in changed[:NAMED]]
            _tell(
                {
                    "kind": "edit",
                    "ddp": each.number,
                    "count": len(changed),
                    "names": names,
                }
            )
    _marks.clear()


def _place(site: Site | None) -> JsonObject:
    return {} if site is None else {"path": site.path, "line": site.line}


def _tell(record: JsonObject) -> None:
    global _told
    state = rank.current()
    if state is not None and _told < MOST:
        _told += 1
        state.recorder.add({**record, "step": state.tracker.steps})


def install() -> None:
    """Subscribe to the moments between which gradients are the job's."""
    events.backward_ended.append(shield.shielded(backward_ended))
    events.step_begins.append(shield.shielded(step_begins))
