"""The statement by which a rank skipped a batch, left a loop, or began no further epoch.

Known from the source, and from the lines at which the rank went forward and backward.
"""

from __future__ import annotations

import ast

from ddpdoctor.analysis.sources import endless, holds, source_of
from ddpdoctor.analysis.training_loops import Place, Trace
from ddpdoctor.core.finding import Location
from ddpdoctor.run.records.process import ExitRecord
from ddpdoctor.run.snapshot import Rank

LAST_LINE = 1 << 63


def exit_location(trace: Trace, place: Place) -> Location | None:
    """The statement by which a rank left a loop; None if that was none of the loop's own."""
    left_at = trace.last.left_at
    if left_at:
        own = (at for at in left_at if at.path == place.path)
        return next((at for at in own if place.source.leaves(at.line, place.loop)), None)
    # The iterator outlived the loop.
    exits = place.source.exits(place.loop)
    only = place.source.only(exits)
    if only is not None:
        return Location(place.path, only.lineno)
    return place.location if exits else None


def skip_location(rank: Rank, place: Place, forward: bool) -> Location:
    """The statement that passes a batch over, behind the ``forward`` or in front of it."""
    forwards = _lines(rank, "forward", place)
    backwards = _lines(rank, "backward", place)
    after = min(forwards, default=0) if forward else 0
    until = min(backwards if forward else forwards or backwards, default=LAST_LINE)
    skips = place.source.skips(place.loop)
    only = place.source.only([each for each in skips if after < each.lineno < until])
    if only is None and not forward and len(skips) == 1:
        # It stands behind a forward that failed: in an `except`.
        only = skips[0]
    if only is not None:
        return Location(place.path, only.lineno)
    if backwards and not skips:
        for condition in place.source.conditions(max(backwards), place.loop):
            if not forward or not condition.lineno < after <= (condition.end_lineno or 0):
                return Location(place.path, condition.lineno)
    return _return_location(rank, place, forward) or place.location


def _return_location(rank: Rank, place: Place, forward: bool) -> Location | None:
    """The ``return`` in front of the backward of a function that the loop calls."""
    if _lines(rank, "backward", place) or place.source.skips(place.loop):
        return None
    at = {each: rank.sites(each) for each in ("forward", "backward")}
    for backward in at["backward"]:
        source = source_of(backward.path)
        if source is None:
            continue
        lines = [each.line for each in at["forward"] if each.path == backward.path]
        after = max((each for each in lines if each < backward.line), default=0)
        stop = backward.line if forward or not after else after
        returns = source.returns_before(stop, after if forward else 0)
        only = source.only(returns)
        if only is not None:
            return Location(backward.path, only.lineno)
    return None


def stop_location(rank: Rank, place: Place) -> Location | None:
    """The statement by which the loop around the training loop was left, if there may be one."""
    if not place.outer:
        return None
    path, source, outer = place.outer[0]
    call = call_to_exit(rank)
    if call is not None and call.path == path and holds(outer, call.line):
        return None
    ways: list[ast.stmt] = source.exits(outer)
    if isinstance(outer, ast.While) and not endless(outer):
        ways.append(outer)
    # A `for` ends by itself, too: after another number of epochs, say.
    conditional = [each for each in ways if not source.counts(each)]
    if isinstance(outer, ast.While):
        conditional = conditional or ways
    if not conditional:
        return None
    return Location(path, conditional[0].lineno if len(conditional) == 1 else outer.lineno)


def call_to_exit(rank: Rank) -> ExitRecord | None:
    """The call by which a rank ended itself."""
    return next((call for call in rank.records.of(ExitRecord) if call.path), None)


def _lines(rank: Rank, phase: str, place: Place) -> list[int]:
    """Those of them that are in the training loop."""
    return [
        at.line for at in rank.sites(phase) if at.path == place.path and holds(place.loop, at.line)
    ]
