"""Models that differ between ranks when DDP is built."""

from __future__ import annotations

import pytest

from tests.support.replicas import found, model
from tests.support.written import Written

ONE: list[object] = ["a", [4, 2], "float32"]
OTHER: list[object] = ["b", [4, 2], "float32"]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([ONE], "it is without b"),
        ([ONE, ["b", [4, 3], "float32"]], "b is [4, 3], not [4, 2]"),
        ([ONE, ["b", [4, 2], "float64"]], "b is float64, not float32"),
        ([OTHER, ONE], "b stands in the place of a"),
        ([ONE, ["renamed", [4, 2], "float32"]], None),
        ([ONE, OTHER], None),
    ],
)
def test_models_that_differ_at_construction(
    written: Written, theirs: list[list[object]], words: str | None
) -> None:
    for rank, parameters in enumerate(([ONE, OTHER], theirs)):
        written.rank(rank, [model(parameters)])
    findings = found(written, over=False)
    assert [each.code for each in findings] == ["DDP707"] * (words is not None)
    assert words is None or words in findings[0].message


def test_the_model_of_most_ranks_is_the_right_one(written: Written) -> None:
    for rank, parameters in enumerate(([OTHER], [ONE, OTHER], [ONE, OTHER])):
        written.rank(rank, [model(parameters, [0, 1, 2])])
    (finding,) = found(written, over=False)
    assert finding.ranks == (0,)
    assert "it is without a" in finding.message


@pytest.mark.parametrize(
    ("count", "words"), [(9, "it has some parameter, too"), (7, "it is without some parameter")]
)
def test_models_that_differ_behind_the_parameters_that_are_listed(
    written: Written, count: int, words: str
) -> None:
    for rank, each in enumerate((8, 8, count)):
        written.rank(rank, [{**model([ONE, OTHER], [0, 1, 2]), "count": each}])
    (finding,) = found(written, over=False)
    assert finding.ranks == (2,)
    assert finding.message.endswith(words)


def test_models_are_compared_once_all_ranks_have_one(written: Written) -> None:
    for rank, records in enumerate(([model([ONE])], [model([OTHER, ONE])], [])):
        written.rank(rank, [{**each, "group": [0, 1, 2]} for each in records])
    assert found(written, over=False) == []


def test_each_model_is_named_where_all_differ(written: Written) -> None:
    for rank, size in enumerate((8, 9, 10)):
        written.rank(rank, [model([ONE, ["b", [size, 2], "float32"]], [0, 1, 2])])
    (finding,) = found(written, over=False)
    assert finding.ranks == (0, 1, 2)
    assert finding.message == (
        "ranks 0, 1 and 2 give DDP different models, here against rank 0: on rank 1, b is [9, 2], "
        "not [8, 2]; on rank 2, b is [10, 2], not [8, 2]"
    )
    assert [each.partition(":")[0] for each in finding.evidence] == ["rank 0", "rank 1", "rank 2"]


def test_each_odd_model_is_held_against_that_of_most(written: Written) -> None:
    for rank, size in enumerate((10, 8, 8, 9, 8)):
        written.rank(rank, [model([["b", [size], "float32"]], list(range(5)))])
    (finding,) = found(written, over=False)
    assert finding.ranks == (0, 3)
    assert finding.message == (
        "ranks 0 and 3 give DDP other models than ranks 1, 2 and 4: on rank 0, b is [10], not [8]; "
        "on rank 3, b is [9], not [8]"
    )


def test_other_names_alone_make_no_other_model(written: Written) -> None:
    for rank, (name, size) in enumerate((("b", 8), ("renamed", 8), ("b", 9))):
        written.rank(rank, [model([[name, [size], "float32"]], [0, 1, 2])])
    (finding,) = found(written, over=False)
    assert finding.ranks == (2,)
    assert finding.message.startswith("rank 2 gives DDP another model than ranks 0 and 1: b is [9]")
