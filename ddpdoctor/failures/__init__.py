"""Look up known failures of distributed jobs by their output."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from ddpdoctor.failures.entry import Failure, Weight, any_of
from ddpdoctor.failures.table import TABLE

_LAST_ERROR = "Last error:"
_OF_CUDA = re.compile(r"Cuda failure:? (?:\d+ )?'([^'\n]{1,200})'")
"""How NCCL prints what torch prints as ``CUDA error: ...``."""


@functools.cache
def _literals() -> tuple[dict[str, set[int]], re.Pattern[str]]:
    """Return the indices of the table's entries by the literals that they require.

    The pattern matches texts that have any of the literals.
    """
    found: dict[str, set[int]] = {}
    for place, failure in enumerate(TABLE):
        for literal in failure.literals:
            found.setdefault(literal, set()).add(place)
    return found, any_of(found)


def recognise(text: str, traceback: str = "") -> tuple[Failure, Mapping[str, str]] | None:
    """Return the known failure of the greatest weight in a text, with its groups, or None.

    Args:
        text: A line of output, or an exception with its message.
        traceback: The exception's frames, if known.
    """
    if _LAST_ERROR in text:
        # NCCL repeats its warning there.
        own = recognise(_as_warning(text.partition(_LAST_ERROR)[2]))
        if own is not None and own[0].weight > Weight.REMARK:
            return own
    if "Cuda failure" in text and (named := _OF_CUDA.search(text)) is not None:
        own = recognise(f"CUDA error: {named[1]}")
        if own is not None and own[0].weight >= Weight.CAUSE:
            return own
    best: tuple[Failure, Mapping[str, str]] | None = None
    # Most of the time is spent here. Searching a pattern takes much longer than its literals.
    literals, any_literal = _literals()
    if any_literal.search(text) is None:
        return None
    held = [places for literal, places in literals.items() if literal in text]
    for place in sorted(set[int]().union(*held)):
        failure = TABLE[place]
        if best is not None and failure.weight <= best[0].weight:
            continue
        if traceback and failure.weight == Weight.REMARK:
            # Every exception has "Error" in its name.
            continue
        groups = failure.match(text, traceback)
        if groups is not None:
            best = failure, groups
    return best


def _as_warning(text: str) -> str:
    return f"NCCL WARN {text.strip()}"


def matching_line(failure: Failure | None, text: str) -> str:
    """Return the line of a text that matches a failure. The first line if no single one does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    matching = (line for line in lines if failure is not None and failure.regex.search(line))
    warned = (line for line in lines if failure and failure.regex.search(_as_warning(line)))
    said = warned if _LAST_ERROR in text else iter(())
    return next(matching, next(said, lines[0] if lines else ""))


__all__ = ["TABLE", "Failure", "Weight", "matching_line", "recognise"]
