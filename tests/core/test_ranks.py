"""Ranks in words."""

from __future__ import annotations

import pytest

from ddpdoctor.core.formatting import named


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([1], "rank 1"),
        ([2, 0], "ranks 0 and 2"),
        ([3, 0, 2], "ranks 0, 2 and 3"),
        ([0, 2, 4, 6], "ranks 0, 2, 4 and 6"),
        (range(1, 1024), "ranks 1-1023"),
        ([0, *range(2, 8)], "ranks 0,2-7"),
    ],
)
def test_few_are_counted_and_many_are_ranges(numbers: list[int], words: str) -> None:
    assert named(numbers) == words
