"""Show what ranks answered, grouped by what they have in common."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from ddpdoctor.core.formatting import shown, spans

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


def grouped(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Group ranks by equal texts, ascending by their first rank.

    Addresses of objects differ between processes, so they do not count. They are left out of a text
    that ranks with different ones have in common.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(texts):
        groups[_ADDRESS.sub("0x...", texts[rank])].append(rank)
    return [
        (ranks, texts[ranks[0]] if len({texts[rank] for rank in ranks}) == 1 else text)
        for text, ranks in groups.items()
    ]


def grouped_lines(texts: Mapping[int, str]) -> Iterator[str]:
    """Yield lines for a terminal: ``ranks 0-6: 0.731``. Longer texts stand below their ranks."""
    for ranks, text in grouped(texts):
        head = f"rank {ranks[0]}:" if len(ranks) == 1 else f"ranks {spans(ranks)}:"
        lines = [shown(line, "\t") for line in text.split("\n")]
        if len(lines) == 1:
            yield f"{head} {lines[0]}".rstrip()
        else:
            yield head
            yield from (f"  {line}".rstrip() for line in lines)
