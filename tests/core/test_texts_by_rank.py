"""Texts of ranks, grouped by what they have in common."""

from __future__ import annotations

import pytest

from ddpdoctor.core.formatting import grouped, grouped_lines


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        ({}, []),
        ({3: "1"}, ["rank 3: 1"]),
        (
            {**dict.fromkeys(range(7), "0.731"), 7: "nan"},
            ["ranks 0-6: 0.731", "rank 7: nan"],
        ),
        ({2: "b", 0: "a", 1: "b"}, ["rank 0: a", "ranks 1-2: b"]),
        ({0: "a\n  b\n", 1: "a\n  b\n"}, ["ranks 0-1:", "  a", "    b", ""]),
        ({0: "\x1b[31mred\u202e"}, ["rank 0: \\x1b[31mred\\u202e"]),
        ({0: ""}, ["rank 0:"]),
    ],
)
def test_lines(texts: dict[int, str], lines: list[str]) -> None:
    assert list(grouped_lines(texts)) == lines


def test_addresses_do_not_separate_ranks() -> None:
    texts = {0: "<A at 0x7f0000000010>", 1: "<A at 0x7f0000000020>", 2: "<B at 0x7f0000000030>"}
    assert grouped(texts) == [([0, 1], "<A at 0x...>"), ([2], "<B at 0x7f0000000030>")]


def test_short_hexadecimal_numbers_are_values() -> None:
    assert len(grouped({0: "0xff", 1: "0xfe"})) == 2
