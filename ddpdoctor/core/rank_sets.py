"""Sets of ranks as people write them: ``0,2-3``."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SET = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def looks_like(text: str) -> bool:
    """Whether a word is a set of ranks."""
    return _SET.fullmatch(text) is not None


def parse(text: str) -> frozenset[int]:
    """The ranks of a set.

    Raises:
        ValueError: It is none, or has more than 100,000 ranks.
    """
    if not looks_like(text):
        raise ValueError(text)
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low or high > 100_000:
            raise ValueError(text)
        ranks.update(range(low, high + 1))
    return frozenset(ranks)


def words(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0, 2 and 3``, ``ranks 0-7`` (three or more in a row become a span)."""
    ordered = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts: list[str] = []
    for span in spans:
        parts += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else [str(rank) for rank in span]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"rank{'s' if len(ordered) > 1 else ''} {text}"
