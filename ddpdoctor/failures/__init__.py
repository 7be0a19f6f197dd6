"""Known failures of distributed jobs, by what they print: the table, and how it is looked up."""

from __future__ import annotations

from collections.abc import Mapping

from ddpdoctor.failures.model import Failure, Page, Weight
from ddpdoctor.failures.table import TABLE


def recognise(text: str, traceback: str = "") -> tuple[Failure, Mapping[str, str]] | None:
    """The heaviest known failure in a text, with its groups; None if it is unknown.

    Args:
        text: A line of output, or an exception with its message.
        traceback: The exception's frames, where they are known.
    """
    best: tuple[Failure, Mapping[str, str]] | None = None
    for failure in TABLE:
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
