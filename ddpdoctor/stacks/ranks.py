"""Sets of ranks as stacks are headed by: ``[0,2-7]``."""

from __future__ import annotations

from collections.abc import Iterable


def rank_set(ranks: Iterable[int]) -> str:
    """``[0,2-7]``."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    return f"[{','.join(words)}]"
