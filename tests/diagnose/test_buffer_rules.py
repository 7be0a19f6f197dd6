"""Buffers that differ between ranks, and broadcasts of buffers by one rank alone."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator

import pytest

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.run.records.base import JsonObject
from tests.support.replicas import found, prints, ranks, tensors
from tests.support.written import T0, Written


def buffers(values: list[list[float]], *, broadcast: bool, start: int = 0) -> Iterator[JsonObject]:
    """What a rank writes of its buffer, from a step on; equal values have equal hashes."""
    for step, each in enumerate(values, start):
        data = base64.b64encode(struct.pack(f"<{len(each)}f", *each)).decode()
        yield {
            "kind": "buffers", "step": step, "module": 0, "armed": step, "broadcast": broadcast,
            "names": ["centre"], "hashes": [repr(each)], "samples": [[len(each), "f", data]],
        }  # fmt: skip


def gathered(rank: int, steps: int = 8) -> list[list[float]]:
    """A running mean: the same at first, then with a drift that is each rank's own."""
    return [[1 + 0.01 * step, 1 + 0.02 * rank * step] for step in range(steps)]


def buffers_found(
    written: Written, values: list[list[list[float]]], broadcast: bool
) -> list[Finding]:
    for rank, each in enumerate(values):
        records = [tensors([0, 1]), *prints("aaaaaaaa"), *buffers(each, broadcast=broadcast)]
        written.rank(rank, records)
    return found(written)


@pytest.mark.parametrize(
    ("broadcast", "severity"), [(True, Severity.WARNING), (False, Severity.INFO)]
)
def test_a_buffer_that_goes_apart(written: Written, broadcast: bool, severity: Severity) -> None:
    (finding,) = buffers_found(written, [gathered(0), gathered(1)], broadcast)
    assert (finding.code, finding.severity, finding.ranks) == ("DDP704", severity, (0, 1))
    assert "buffer centre differs" in finding.message
    assert "since step 1" in finding.message
    assert ("turned off" in finding.message) is not broadcast


def test_since_when_a_buffer_differs_and_by_how_much(written: Written) -> None:
    (finding,) = buffers_found(written, [gathered(0), gathered(1)], True)
    assert finding.message == (
        "buffer centre differs between ranks 0 and 1 since step 1, and DDP broadcasts no buffers, "
        "as the module had none when DDP was built"
    )
    assert finding.evidence == (
        "centre: equal before step 0, different at all 7 looks from step 1 to 7; norm of 2 "
        "elements 1.465 on rank 0, 1.563 on rank 1",
    )


def test_several_buffers_are_one_finding(written: Written) -> None:
    for rank in (0, 1):
        looks = []
        for each in buffers(gathered(rank), broadcast=True):
            each["names"], each["hashes"] = ["centre", "scale"], each["hashes"] * 2
            looks.append({**each, "samples": each["samples"] * 2})
        written.rank(rank, [tensors([0, 1]), *prints("aaaaaaaa"), *looks])
    (finding,) = found(written)
    assert finding.message.startswith("buffer centre and 1 more differ between ranks 0 and 1")
    assert [each.partition(":")[0] for each in finding.evidence] == ["centre", "scale"]


@pytest.mark.parametrize(
    ("apart", "moves", "expected"),
    # Apart by half of the norm, which is about 115; moved by three quarters of that distance.
    [(1.0, 0.7, 1), (1.0, 0.8, 0), (50.0, 0.4, 1), (70.0, 0.4, 0)],
)
def test_versions_of_one_thing_are_near_and_move_slowly(
    written: Written, apart: float, moves: float, expected: int
) -> None:
    first = [[100.0, 0.0]]
    values = [
        [*first, *([100.0 + moves * step, apart * rank] for step in range(1, 8))] for rank in (0, 1)
    ]
    assert len(buffers_found(written, values, True)) == expected


@pytest.mark.parametrize(("looks", "expected"), [(5, 1), (4, 1), (3, 0)])
def test_a_difference_is_seen_several_times(written: Written, looks: int, expected: int) -> None:
    values = [gathered(0, looks), gathered(1, looks)]
    assert len(buffers_found(written, values, True)) == expected


def test_a_single_number_may_be_a_meter(written: Written) -> None:
    values = [[[1 + 0.02 * rank * step] for step in range(8)] for rank in (0, 1)]
    (finding,) = buffers_found(written, values, True)
    assert (finding.code, finding.severity) == ("DDP704", Severity.INFO)


ANEW = [[[1.0, (-1.0) ** (step + rank)] for step in range(8)] for rank in (0, 1)]
HEALS = [gathered(0), [*gathered(1)[:7], gathered(0)[7]]]
APART = [[[1.0 + step / 100, sign * 2.0] for step in range(8)] for sign in (1, -1)]


@pytest.mark.parametrize(
    "values",
    [[gathered(0), gathered(0)], ANEW, HEALS, APART, [gathered(0, 3), gathered(1, 3)]],
    ids=["equal", "new in each step", "equal again", "nothing in common", "too few looks"],
)
@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_of_each_rank_are_left_alone(
    written: Written, values: list[list[list[float]]], broadcast: bool
) -> None:
    assert buffers_found(written, values, broadcast) == []


def test_a_buffer_that_differs_from_the_start_is_meant_to(written: Written) -> None:
    late = [gathered(rank)[1:] for rank in (0, 1)]
    assert buffers_found(written, late, broadcast=False) == []


def evaluation(armed: int) -> JsonObject:
    return {
        "kind": "evaluation", "armed": armed, "group": [0, 1], "buffers": 3, "type": "Net",
        "path": "/job/train.py", "line": 6,
    }  # fmt: skip


def test_an_evaluation_of_rank_0_alone(written: Written) -> None:
    ranks(written, [*prints("aaaa"), evaluation(2)], [*prints("aaaa")])
    (finding,) = found(written, over=False)
    assert (finding.code, finding.ranks) == ("DDP402", (0,))
    assert finding.evidence[0].startswith("once, the first one after ")


def test_an_evaluation_that_another_rank_may_have_lost(written: Written) -> None:
    fault = {"kind": "fault", "hook": "buffers", "error": "ValueError"}
    ranks(written, [*prints("aaaa"), evaluation(2)], [*prints("aaaa"), fault])
    assert found(written) == []


def test_a_rank_that_has_not_come_to_the_evaluation_yet_is_waited_for(written: Written) -> None:
    ranks(written, [*prints("aaaa"), evaluation(4)], [*prints("aaaa")])
    assert found(written, over=False) == []


@pytest.mark.parametrize("over", ["the rank", "the job"])
def test_who_has_ended_will_not_come_to_the_evaluation(written: Written, over: str) -> None:
    end = {"kind": "end", "time": T0, "steps": 4, "armed": 4}
    theirs = [*prints("aaaa"), *([end] if over == "the rank" else [])]
    ranks(written, [*prints("aaaa"), evaluation(4)], theirs)
    assert [each.code for each in found(written, over=over == "the job")] == ["DDP402"]


@pytest.mark.parametrize(
    ("stderr", "codes"),
    [
        ("what(): [enforce fail] op.preamble.length <= op.nbytes. 40 vs 8", ["DDP402"]),
        ("", ["DDP402", "DDP904"]),
    ],
)
def test_the_abort_of_a_mispaired_collective(
    written: Written, stderr: str, codes: list[str]
) -> None:
    """It is the consequence of what one rank alone did, and no crash of its own."""
    ranks(written, [*prints("aaaa"), evaluation(2)], [*prints("aaaa")])
    written.exit(1, -6, T0 + 1_000_000_000)
    assert [each.code for each in written.findings(status=1, stderr=stderr)] == codes


def test_an_evaluation_of_all_ranks_is_left_alone(written: Written) -> None:
    ranks(written, [*prints("aaaa"), evaluation(2)], [*prints("aaaa"), evaluation(2)])
    assert found(written) == []
