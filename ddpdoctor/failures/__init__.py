"""The table of known failures of distributed jobs, by what they print, and its lookup."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from ddpdoctor.failures.entry import Failure, Page, Weight, any_of
from ddpdoctor.failures.table import TABLE

_LITERALS: dict[str, set[int]] = {}
"""The entries of the table that a literal may mean, by their places."""
for _place, _failure in enumerate(TABLE):
    for _literal in _failure.literals:
        _LITERALS.setdefault(_literal, set()).add(_place)

_WITHOUT = {place for place, failure in enumerate(TABLE) if not failure.literals}
"""Entries of the table whose matches need not hold any literal."""


@functools.cache
def _any() -> re.Pattern[str]:
    return any_of(_LITERALS)


def recognise(text: str, traceback: str = "") -> tuple[Failure, Mapping[str, str]] | None:
    """The heaviest known failure in a text, with its groups; None if it is unknown.

    Args:
        text: A line of output, or an exception with its message.
        traceback: The exception's frames, where they are known.
    """
    best: tuple[Failure, Mapping[str, str]] | None = None
    # Nearly all that a log takes is here: a pattern takes many times as long as its literals.
    if not _WITHOUT and _any().search(text) is None:
        return None
    held = [_LITERALS[literal] for literal in _LITERALS if literal in text]
    for place in sorted(_WITHOUT.union(*held)):
        failure = TABLE[place]
        if best is not None and failure.weight <= best[0].weight:
            continue
        if traceback and failure.weight == Weight.REMARK:
            # Every exception calls itself an error.
            continue
        groups = failure.match(text, traceback)
        if groups is not None:
            best = failure, groups
    return best


def matching_line(failure: Failure | None, text: str) -> str:
    """The line of a text by which a failure is known; the first one if it has none alone."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    matching = (line for line in lines if failure is not None and failure.regex.search(line))
    return next(matching, lines[0] if lines else "")


__all__ = ["TABLE", "Failure", "Page", "Weight", "matching_line", "recognise"]
