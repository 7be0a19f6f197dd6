"""Parameters that differ between ranks: the step, the tensors, and by how much."""

from __future__ import annotations

import base64
import math
import struct
import time
from pathlib import Path

import pytest

from ddpdoctor.diagnose.replicas.differences import elements as elements_of
from ddpdoctor.diagnose.replicas.differences import odd, unpacked
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.model import PackedTensor
from tests.support.replicas import FAMILY, found, prints, ranks, tensors
from tests.support.written import Written


def test_the_first_step_tensor_and_rank_that_differ_are_named(written: Written) -> None:
    ranks(written, list(prints("aaaaaa")), list(prints("aaabbb")), list(prints("aaaaaa")))
    (finding,) = found(written)
    assert (finding.code, finding.ranks) == ("DDP701", (1,))
    assert "since step 3" in finding.message
    evidence = "\n".join(finding.evidence)
    assert "equal after step 2, different after step 3" in evidence
    assert "1 of 2 tensors differ" in evidence
    assert "second.weight: norm 97 on rank 0, 98 on rank 1" in evidence


def test_the_first_step_is_bounded_by_the_shared_ones(written: Written) -> None:
    sparse = [each for each in prints("aaaabbbbbbbbbbbb") if each["step"] % 4 == 0]
    ranks(written, list(prints("aaaaaaaaaaaaaaaa")), sparse)
    (finding,) = found(written)
    assert "since a step from 1 to 4" in finding.message


def test_equal_ranks_are_left_alone(written: Written) -> None:
    ranks(written, list(prints("abcdef")), list(prints("abcdef")))
    assert found(written) == []


def elements(step: int, values: list[float], count: int | None = None) -> JsonObject:
    data = struct.pack(f"<{len(values)}f", *values)
    told = [1, count or len(values), "f", base64.b64encode(data).decode()]
    return {"kind": "elements", "step": step, "module": 0, "armed": step + 1, "tensors": [told]}


def test_how_far_replicas_are_apart_is_told(written: Written) -> None:
    each = ([1.0, 2.0, math.nan], [1.0, 2.5, 3.0], [1.25, 2.0, 3.0])
    ranks(
        written,
        [*prints("aaaa"), elements(3, each[0], 9)],
        [*prints("abbb"), elements(3, each[1], 9)],
        [*prints("accc"), elements(3, each[2], 9)],
    )
    (finding,) = found(written)
    assert (
        "second.weight: max difference 0.5 after step 3 between ranks 0 and 1, of 3 elements "
        "looked at (of 9)"
    ) in finding.evidence
    assert not any("second.weight: norm" in line for line in finding.evidence)


def test_elements_count_from_the_step_on_in_which_tensors_differ(written: Written) -> None:
    for step, seen in ((0, False), (1, True), (2, True)):
        path = written.path / str(step)
        path.mkdir()
        each = Written(path)
        looks = [elements(step, [1.0, 2.0 + rank]) for rank in (0, 1)]
        ranks(each, [*prints("aaaa"), looks[0]], [*prints("abbb"), looks[1]])
        (finding,) = found(each)
        line = f"second.weight: max difference 1 after step {step} between ranks 0 and 1, of all"
        assert any(text.startswith(line) for text in finding.evidence) is seen


@pytest.mark.parametrize(
    "other",
    [
        elements(3, [1.0, 2.0]),
        elements(2, [1.0, 3.0]),
        elements(3, [1.0]),
        elements(3, [1.0, 2.0], 7),
    ],
)
def test_elements_that_are_equal_or_no_pair_leave_the_norms(
    written: Written, other: JsonObject
) -> None:
    ranks(written, [*prints("aaaa"), elements(3, [1.0, 2.0])], [*prints("abbb"), other])
    (finding,) = found(written)
    assert not any("max difference" in line for line in finding.evidence)
    assert any("second.weight: norm" in line for line in finding.evidence)


def suspicion(age: float) -> JsonObject:
    now = time.time_ns()
    return {"kind": "suspicion", "time": now - int(age * 1e9), "restart": 0, "module": 0}


@pytest.mark.parametrize(
    ("age", "arrived", "over", "expected"),
    [(0, False, False, 0), (0, True, False, 1), (9, False, False, 1), (0, False, True, 1)],
)
def test_a_finding_waits_a_little_for_what_ranks_were_asked(
    written: Written, age: float, arrived: bool, over: bool, expected: int
) -> None:
    written.supervisor.append(suspicion(age))
    each = [[elements(3, [float(rank)])] if arrived else [] for rank in (0, 1)]
    ranks(written, [*prints("aaaa"), *each[0]], [*prints("abbb"), *each[1]])
    assert len(found(written, over=over)) == expected


def test_replicas_that_are_averaged_now_and_then_are_left_alone(written: Written) -> None:
    ranks(written, list(prints("aaaaaaaa")), list(prints("abbaabba")))
    assert found(written) == []


def together(step: int, letter: str | None) -> JsonObject:
    record = {"kind": "together", "step": step, "module": 0, "armed": step + 2}
    return record if letter is None else {**record, "parameters": letter}


@pytest.mark.parametrize(
    ("step", "seen", "expected"),
    [
        (3, ("m", "m"), 0),
        # They were brought together before they differed, or not at all.
        (0, ("m", "m"), 1),
        (3, ("m", "n"), 1),
        # One of them could not pay for the look.
        (3, ("m", None), 0),
    ],
)
def test_replicas_that_are_equal_after_a_collective_are_averaged(
    written: Written, step: int, seen: tuple[str, str | None], expected: int
) -> None:
    each = [[*prints(hashes), together(step, seen[rank])] for rank, hashes in enumerate(AVERAGED)]
    ranks(written, *each)
    assert len(found(written)) == expected


def test_an_averaging_whose_record_may_be_lost(written: Written) -> None:
    fault = {"kind": "fault", "hook": "fingerprints", "error": "ValueError"}
    ranks(written, list(prints(AVERAGED[0])), [*prints(AVERAGED[1]), fault])
    assert found(written) == []


AVERAGED = ("aaaaaaaa", "abbbbbbb")

AVERAGES = {
    "loop": "for p in model.parameters():\n    dist.all_reduce(p.data)\n",
    "vector": "flat = torch.cat([p for p in model.parameters()])\ndist.broadcast(flat, 0)\n",
    "averager": "averager.average_parameters(model.parameters())\n",
    "state": "for value in model.state_dict().values():\n    dist.all_reduce(value)\n",
}
OTHERS = {
    "gradients": "for p in model.parameters():\n    dist.all_reduce(p.grad)\n",
    "loss": "dist.all_reduce(loss.data)\n",
    "flat": "flat = torch.cat([p.grad for p in model.parameters()])\ndist.all_reduce(flat)\n",
}


@pytest.mark.parametrize("helper", [False, True])
@pytest.mark.parametrize("name", [*AVERAGES, *OTHERS])
def test_who_averages_later_is_left_alone_until_then(
    written: Written, tmp_path: Path, name: str, helper: bool
) -> None:
    body = {**AVERAGES, **OTHERS}[name]
    train = tmp_path / "train.py"
    train.write_text("import helper\n" if helper else body)
    (tmp_path / "helper.py").write_text(body)
    at = {"kind": "site", "phase": "forward", "path": str(train), "line": 1}
    ranks(written, *([at, *prints(hashes)] for hashes in AVERAGED))
    assert len(found(written, over=False)) == (name in OTHERS)


@pytest.mark.parametrize(("status", "ran", "expected"), [(0, 0, 1), (1, 0, 0), (1, 2, 1)])
def test_an_averaging_that_never_came_is_none(
    written: Written, tmp_path: Path, status: int, ran: int, expected: int
) -> None:
    train = tmp_path / "train.py"
    train.write_text(AVERAGES["loop"])
    # Weights that are spread before the training are no averaging to come.
    at = {"kind": "site", "phase": "wait", "path": str(train), "line": ran}
    ranks(written, *([at, *prints(hashes)] for hashes in AVERAGED))
    codes = [each.code for each in written.findings(status=status)]
    assert codes.count("DDP701") == expected


@pytest.mark.parametrize(("over", "expected"), [(False, 0), (True, 1)])
def test_steps_without_an_all_reduce_may_be_averaged_later(
    written: Written, over: bool, expected: int
) -> None:
    each = [[{**one, "armed": 0} for one in prints(hashes)] for hashes in AVERAGED]
    ranks(written, *each)
    assert len(found(written, over=over)) == expected


def test_a_hook_of_local_sgd_says_that_replicas_differ_by_design(written: Written) -> None:
    for rank, hashes in enumerate(("aaaa", "bbbb")):
        written.rank(rank, [tensors([0, 1], hook="post_localSGD_hook"), *prints(hashes)])
    assert found(written) == []


@pytest.mark.parametrize(
    ("later", "expected"), [(999, 0), (1000, 1), (1001, 1)], ids=["pause", "a thousand", "more"]
)
def test_a_thousand_steps_without_an_all_reduce_are_no_pause(
    written: Written, later: int, expected: int
) -> None:
    each = []
    for letter in "ab":
        looks = (*prints("a"), *prints(letter, start=1), *prints(letter, start=1 + later))
        each.append([{**one, "armed": 0} for one in looks])
    ranks(written, *each)
    assert len(found(written, over=False)) == expected


@pytest.mark.parametrize(
    ("values", "expected"), [("aab", (2,)), ("ab", ()), ("aabb", ()), ("", ())]
)
def test_the_odd_ranks_are_those_without_the_majority(
    values: str, expected: tuple[int, ...]
) -> None:
    assert odd(dict(enumerate(values))) == expected


def test_damaged_elements_are_none() -> None:
    good = base64.b64encode(struct.pack("<2d", 1.0, 2.0)).decode()
    for form, data, values in (("d", good, (1.0, 2.0)), ("x", good, ()), ("f", "=", ())):
        assert elements_of(PackedTensor(elements=2, format=form, data=data)) == values
    assert unpacked("=") == []


@pytest.mark.parametrize(("seen", "expected"), [("aaab", 0), ("aabb", 1)])
def test_a_live_job_needs_a_second_look(written: Written, seen: str, expected: int) -> None:
    ranks(written, list(prints("aaaaaa")), list(prints(seen)))
    assert len(found(written, over=False)) == expected


@pytest.mark.parametrize(
    ("step", "gradients", "expected"),
    [(2, (1.0, 2.0), "DDP308"), (2, (1.0, 1.0), "DDP701"), (1, (1.0, 2.0), "DDP701")],
)
def test_one_step_without_reduction_explains_what_fingerprints_show(
    written: Written, step: int, gradients: tuple[float, float], expected: str
) -> None:
    built: JsonObject = {"kind": "ddp", "number": 0, "group_ranks": [0, 1], "parameters": ["w"]}
    records = [
        {
            "kind": "unreduced", "step": step, "ddp": 0, "cause": "step in no_sync",
            "gradients": {"w": value}, "parameters": {"w": 1.0}, "path": "/job/t.py", "line": 4,
        }
        for value in gradients
    ]  # fmt: skip
    ranks(
        written,
        [built, *prints("aaaaaa"), records[0]],
        [built, *prints("aabbbb"), records[1]],
    )
    found = [each.code for each in written.findings(status=None)]
    assert found == [expected]


def test_steps_of_other_numbers_of_forwards_are_not_compared(written: Written) -> None:
    ranks(written, list(prints("aaaa")), list(prints("bbbb", armed=2)))
    assert found(written) == []


def test_replicas_of_different_groups_are_not_compared(written: Written) -> None:
    for rank, hashes in enumerate(("aaaa", "bbbb")):
        written.rank(rank, [tensors([rank, rank + 2]), *prints(hashes)])
    assert found(written) == []


def test_gradients_that_differ_are_the_cause(written: Written) -> None:
    ranks(written, list(prints("aaaa", gradients="x")), list(prints("abbb", gradients="y")))
    (finding,) = found(written)
    assert finding.code == "DDP701"
    assert "gradients differ already" in finding.message


def test_a_change_on_a_rank_is_not_its_own_where_another_has_not_looked(written: Written) -> None:
    outside = {"kind": "outside", "step": 1, "module": 0, "count": 1, "names": ["second.weight"]}
    sparse = [each for each in prints("aaaa") if each["step"] != 1]
    ranks(written, sparse, [*prints("aabb"), outside])
    assert [each.code for each in found(written)] == ["DDP701"]


def test_damaged_records_are_passed_over(tmp_path: Path) -> None:
    written = Written(tmp_path)
    damaged: list[JsonObject] = [
        {"kind": "tensors", "module": "x", "group": None, "names": None},
        {"kind": "fingerprint", "step": None, "detail": "=", "hyper": 3, "parameters": []},
        {"kind": "model", "group": 3},
        {"kind": "model", "group": [0, 1]},
        {"kind": "nonfinite"},
        {"kind": "evaluation", "group": [0, 1]},
        {"kind": "load"},
        {"kind": "elements", "module": 0, "tensors": [[0, 2, "f", "="], 3, [1, "x", "f", ""]]},
        {"kind": "buffers", "module": 0, "names": ["mean"]},
        {"kind": "outside"},
        {"kind": "cut"},
    ]
    for rank in (0, 1):
        written.rank(rank, [tensors([0, 1]), *prints("ab"[rank] * 3), *damaged])
    assert {each.code for each in found(written)} <= set(FAMILY)
