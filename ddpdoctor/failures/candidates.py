"""Which of the failures in a run may have ended it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ddpdoctor.failures import Weight
from ddpdoctor.failures.runs import LATER
from ddpdoctor.failures.sightings import Sighting

_OF_GPU = re.compile(r"(?i)cuda|nvidia|nccl|gpu|driver")
_STATUSES = ("exit-status", "crash-status", "abort-status")
"""A process's end as its launcher says it, which may have followed from that of another one."""

ONE_RUN = 7 * 86_400.0
"""Seconds beyond which times are of other clocks: some lines name no year, and some no zone."""


def causes(sightings: Sequence[Sighting]) -> list[Sighting]:
    """What may have ended the job, the likeliest first; empty if no process failed."""
    return found_in(sightings)[0]


def found_in(sightings: Sequence[Sighting]) -> tuple[list[Sighting], bool]:
    """What may be the cause, the first in time first, and whether it is known to be one."""
    sightings = _without_limits(_without_yielding(sightings))
    if not any(map(_may_have_ended_it, sightings)):
        return [], False
    causes = _ending(sightings, Weight.DECISIVE, Weight.CAUSE, Weight.GENERIC, Weight.SYMPTOM)
    if causes := _without_warnings(causes):
        raised = _raised_before(causes, sightings)
        return _ordered(raised or causes), not raised
    lost = _ending(sightings, Weight.STOPPED, Weight.BARE, Weight.CONSEQUENCE)
    unsure = [e for e in sightings if _is_unsure(e) and not (e.spoken and lost)]
    if unsure:
        return _ordered(unsure)[-1:], False
    if lost:
        return _ordered(lost), lost[0].weight == Weight.STOPPED
    spoken = [each for each in sightings if each.spoken and each.behind < LATER]
    if spoken:
        return _ordered(spoken), False
    wrappers = [each for each in sightings if each.weight == Weight.WRAPPER]
    remarks = [each for each in sightings if each.weight == Weight.REMARK and each.final]
    return sorted(wrappers, key=_wrapper_order) or remarks, False


def _may_have_ended_it(each: Sighting) -> bool:
    warns = each.is_warning or each.warned
    return each.weight >= Weight.REMARK and not warns and (each.final or each.uncaught)


def _is_unsure(each: Sighting) -> bool:
    """Plain lines came after it, which may be those of other ranks, if lines do not say whose."""
    near = each.rank is None and each.behind < LATER
    return each.weight >= Weight.SYMPTOM and (each.uncaught or near)


def _ending(sightings: Sequence[Sighting], *weights: Weight) -> list[Sighting]:
    """What ended a process, of the first of these weights of which there is any."""
    found = ([e for e in sightings if e.weight == weight and e.final] for weight in weights)
    return next((each for each in found if each), [])


def _raised_before(causes: Sequence[Sighting], all_: Sequence[Sighting]) -> list[Sighting]:
    """What ended a process before a launcher said how another one ended, after plain lines."""
    first = causes[0]
    if name_of(first) not in _STATUSES:
        return []
    return [e for e in all_ if e.uncaught and e.weight == Weight.CAUSE and e.order < first.order]


def _without_yielding(sightings: Sequence[Sighting]) -> list[Sighting]:
    """The sightings without those that another failure in the log explains."""
    # What the job went on after explains no end.
    names = {name_of(each) for each in sightings if not (each.traceback and _was_caught(each))}
    left, explained = [], set[str]()
    for each in sightings:
        nearer = set[str]()
        if each.failure is not None:
            nearer = names & {*each.failure.yields_to}
            nearer |= {
                name_of(one)
                for one in sightings
                if name_of(one) in each.failure.follows and one.order < each.order
            }
        if not nearer:
            left.append(each)
        elif each.final or each.uncaught:
            explained |= nearer
    # What explains the end of a process ended it.
    return [
        replace(each, final=True, ignored=False) if name_of(each) in explained else each
        for each in left
    ]


def _without_warnings(causes: list[Sighting]) -> list[Sighting]:
    """Without the warnings that no exception speaks of: the job went on after them."""
    raised = [each for each in causes if each.traceback]
    follows = any(_OF_GPU.search(each.text) for each in raised)
    return causes if follows or not raised else [each for each in causes if not each.warned]


def _without_limits(sightings: list[Sighting]) -> list[Sighting]:
    """Without the time limits that only cleared away what a failure before them had left."""
    failed = [
        each.order
        for each in sightings
        if each.final
        and (name_of(each) == "nccl-timeout" or (each.uncaught and each.weight == Weight.CAUSE))
    ]
    return [
        each
        for each in sightings
        if name_of(each) != "time-limit" or not any(order < each.order for order in failed)
    ]


def _was_caught(each: Sighting) -> bool:
    return not each.final and not each.uncaught


def name_of(each: Sighting) -> str:
    """The name of a failure in the table; ``exception`` of one that it does not know."""
    return "exception" if each.failure is None else each.failure.known.name


def _wrapper_order(each: Sighting) -> tuple[bool, bool, bool, tuple[int, int]]:
    """Whose status is 1 comes before those that torchrun stopped, and before its own exception."""
    stopped = each.failure is not None and each.failure.known.name == "stopped-by-torchrun"
    return stopped, not each.root, each.rank is None, each.order


def _ordered(sightings: list[Sighting]) -> list[Sighting]:
    """By time where it is known of all; else by their place in the log."""
    if is_timed(sightings):
        return sorted(sightings, key=lambda each: (each.time or 0.0, each.order))
    return sorted(sightings, key=lambda each: each.order)


def is_timed(sightings: Sequence[Sighting]) -> bool:
    """Whether their times order them: within a single log its lines do so better."""
    several = len({each.source for each in sightings}) > 1
    times = [each.time for each in sightings if each.time is not None]
    return several and len(times) == len(sightings) and max(times) - min(times) <= ONE_RUN
