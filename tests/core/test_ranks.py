"""Ranks, sizes and names in words."""

from __future__ import annotations

import pytest

from ddpdoctor.core import formatting
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


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (64 << 20, "64 MiB"),
        (3 << 29, "1.5 GiB"),
        ((1 << 30) - 1, "1 GiB"),
        (2 << 40, "2048 GiB"),
        (None, "-"),
    ],
)
def test_bytes_have_binary_units(size: float | None, text: str) -> None:
    assert formatting.binary_size(size) == text


def test_of_many_names_the_first_are_listed() -> None:
    assert formatting.listed(["a", "b"]) == "a, b"
    assert formatting.listed("abcd", 2) == "a, b and 2 more"
