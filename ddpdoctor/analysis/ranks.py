"""Ranks in words, few or a thousand of them."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.probe.observers.ledger import ranges

SHORT = 4
"""Ranks that are named one by one."""


def named(numbers: Iterable[int]) -> str:
    """Ranks as a sentence says them: ``rank 1``, ``ranks 0, 2 and 3``, ``ranks 0,2-7``."""
    chosen = sorted(set(numbers))
    words = [str(number) for number in chosen]
    if len(words) == 1:
        return f"rank {words[0]}"
    if len(words) > SHORT:
        return f"ranks {ranges(chosen)}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"
