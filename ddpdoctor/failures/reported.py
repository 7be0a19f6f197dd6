"""Ranks that torchrun's report names, for exceptions whose lines name none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ddpdoctor.failures.model import Weight
from ddpdoctor.failures.sightings import STATUS, Sighting

_RAISED = re.compile(r"exitcode\s*: ?1\b")
_SUMMARY = re.compile(r"^\s*exitcode\s*:")
"""In torchrun's last report, which has ranks of all nodes; its line before has local ones."""


def with_ranks(sightings: Sequence[Sighting]) -> Sequence[Sighting]:
    """The sightings of a run, its exceptions with the ranks that ended with status 1.

    Only if all of them are the same: then each of these ranks raised it.
    """
    raised = [
        each
        for each in sightings
        if each.traceback and each.uncaught and each.weight in (Weight.CAUSE, Weight.GENERIC)
    ]
    ranks = _failed(sightings)
    alike = len({each.text for each in raised}) == 1
    if not alike or not ranks or any(each.rank is not None or each.who for each in raised):
        return sightings
    # Whose process the log goes on after ended last.
    raised.sort(key=lambda each: not each.final)
    given = {id(each): rank for each, rank in zip(raised, ranks, strict=False)}
    return [replace(e, rank=given[id(e)]) if id(e) in given else e for e in sightings]


def _failed(sightings: Sequence[Sighting]) -> list[int]:
    """The ranks that ended with status 1, which torchrun noticed first first."""
    status = [each for each in sightings if STATUS.search(each.text) and each.rank is not None]
    status = [each for each in status if _SUMMARY.match(each.text)] or status
    if any(not _RAISED.search(each.text) and each.root for each in status):
        return []
    ordered = sorted(status, key=lambda each: (not each.root, each.order))
    failed = (each.rank for each in ordered if _RAISED.search(each.text))
    return list(dict.fromkeys(rank for rank in failed if rank is not None))
