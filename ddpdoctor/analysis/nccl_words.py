"""What NCCL says of collectives of unequal size; torch's watchdog prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator

UNEQUAL = (
    r"message truncated : receiving \d+ bytes instead of \d+"
    r"|collective mismatch error, local size \d+ remote size \d+"
)
"""Of its socket transport, and of that for InfiniBand."""

_SAID = re.compile(rf"\[rank(\d+)\]:|{UNEQUAL}")


def unequal_sizes(stderr: str) -> Iterator[str]:
    """What it said, once for each rank, as lines of evidence."""
    rank = ""
    said: set[str] = set()
    for match in _SAID.finditer(stderr):
        # The line itself has no rank; the one that introduces it does.
        rank = match[1] or rank
        if match[1] is None and rank not in said:
            said.add(rank)
            words = match[0].replace(" : ", ": ")
            yield f"NCCL on rank {rank or '?'}: {words}: the ranks' collectives differ in size"
