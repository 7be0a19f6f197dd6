"""A line of code. Ranks write it into their records, so this module imports next to nothing."""

from __future__ import annotations

from typing import NamedTuple


class Location(NamedTuple):
    """A line of the user's code; in JSON the pair of both."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"
