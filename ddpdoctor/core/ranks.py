"""Sets of ranks, as people write and read them: ``0,2-3``, ``ranks 0, 2 and 3``."""

from __future__ import annotations

import re
from collections.abc import Iterable

SHORT = 4
"""Ranks that a sentence names one by one."""

_SET = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def is_rank_set(text: str) -> bool:
    """Whether a word is a set of ranks."""
    return _SET.fullmatch(text) is not None


def rank_set(text: str) -> frozenset[int]:
    """The ranks of a set.

    Raises:
        ValueError: It is none, or has more than 100,000 ranks.
    """
    if not is_rank_set(text):
        raise ValueError(text)
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low or high > 100_000:
            raise ValueError(text)
        ranks.update(range(low, high + 1))
    return frozenset(ranks)


def spans(ranks: Iterable[int]) -> str:
    """``0,2-7``."""
    found: list[list[int]] = []
    for number in sorted(set(ranks)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def bracketed(ranks: Iterable[int]) -> str:
    """``[0,2-7]``, as stacks are headed."""
    return f"[{spans(ranks)}]"


def named(ranks: Iterable[int], noun: str = "rank") -> str:
    """``rank 1``, ``ranks 0, 2 and 3``, ``ranks 0,2-7``; or of what else is numbered."""
    chosen = sorted(set(ranks))
    words = [str(number) for number in chosen]
    if len(words) == 1:
        return f"{noun} {words[0]}"
    if len(words) > SHORT:
        return f"{noun}s {spans(chosen)}"
    return f"{noun}s {', '.join(words[:-1])} and {words[-1]}"
