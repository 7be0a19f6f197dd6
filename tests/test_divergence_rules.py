"""Divergence between ranks: hashes of tensors, the steps that ranks share, and the rules."""

from __future__ import annotations

import base64
import math
import struct
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpdoctor.analysis.replicas import unpacked
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.probe.observers.fingerprints import Fingerprints, Pace, _norms, packed
from ddpdoctor.probe.observers.hashing import PIECE, hash_of, hashable
from ddpdoctor.probe.observers.readback import Readback
from ddpdoctor.probe.runtime import torch_private
from ddpdoctor.run.record import Record
from tests.written import T0, Written

FAMILY = (
    "DDP319", "DDP402", "DDP403", "DDP701", "DDP702", "DDP703", "DDP704", "DDP705", "DDP706",
    "DDP707",
)  # fmt: skip


# -- hashes


def hashed(tensor: torch.Tensor) -> int:
    with torch.no_grad():
        return int(hash_of(tensor))


DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8,
    torch.complex64,
)  # fmt: skip
SHAPES = ((9,), (5001,), (33, 41, 7), (2 * PIECE + 3,))


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (100 * torch.rand(shape, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_bits_have_equal_hashes_and_no_others(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = numbers(shape, dtype)
    before = hashed(tensor)
    assert hashed(tensor.clone()) == before
    flat = tensor.view(-1)
    # At odd places too, where signs are the first bit of eight bytes.
    for place in (1, 3, tensor.numel() - 1):
        other = tensor.clone()
        other.view(-1)[place] += 1
        assert hashed(other) != before
    swapped = tensor.clone()
    swapped.view(-1)[[1, 3]] = flat[[3, 1]]
    assert (hashed(swapped) == before) == torch.equal(swapped, tensor)
    if dtype.is_signed:
        two = tensor.clone()
        two.view(-1)[[1, 5]] *= -1
        assert hashed(two) != before
        assert hashed(-tensor) != before


def test_bits_that_compare_equal_are_told_apart() -> None:
    zeros = torch.zeros(10)
    assert hashed(zeros) != hashed(-zeros)
    quiet = torch.full((10,), float("nan"))
    other = quiet.view(torch.int32).bitwise_xor(1).view(torch.float32)
    assert hashed(quiet) == hashed(quiet.clone()) != hashed(other)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2)])
def test_small_tensors_have_a_hash(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        assert hashed(torch.ones(shape, dtype=dtype)) == hashed(torch.ones(shape, dtype=dtype))


def test_views_into_other_tensors_are_hashed_as_their_copies() -> None:
    base = numbers((60, 300), torch.float32)
    for view in (base.t(), base[1:, 1:], base.view(-1)[1:], base[::2], base.half().view(-1)[3:]):
        assert hashed(view) == hashed(view.contiguous().clone())


def test_a_hash_draws_no_random_number_and_changes_nothing() -> None:
    tensor = torch.nn.Parameter(torch.randn(5000))
    state, version = torch.get_rng_state(), tensor._version
    hashed(tensor)
    assert torch.equal(torch.get_rng_state(), state)
    assert tensor._version == version


def test_what_is_no_plain_block_of_memory_is_not_hashed() -> None:
    assert hashable(torch.nn.Parameter(torch.ones(2)))
    assert not hashable(torch.ones(2).to_sparse())
    assert not hashable(torch.ones(2, device="meta"))
    assert not hashable(torch.nn.UninitializedParameter())


def test_numbers_on_the_cpu_are_there_at_once() -> None:
    read = Readback([torch.tensor(3), torch.tensor(-(2**63))])
    assert read.ready
    assert read.numbers() == [3, -(2**63)]
    assert Readback([]).numbers() == []


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_details_are_read_as_written(hashes: list[int]) -> None:
    found = unpacked(packed(hashes, [0.5] * len(hashes)))
    assert found == [(each >> 32 & 0xFFFFFFFF, 0.5) for each in hashes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_every_dtype_have_a_norm(dtype: torch.dtype) -> None:
    tensors = [torch.ones((), dtype=dtype), torch.ones(0, dtype=dtype), torch.ones(2)]
    norms = _norms(tensors)
    assert norms is not None
    assert norms.numbers()[2] == pytest.approx(2**0.5)
    assert unpacked(packed([0] * 3, [1e300, math.nan, -0.0]))[0][1] == math.inf


# -- which steps


def walk(costs: Iterator[bool], steps: int) -> list[int]:
    """The steps that a rank looks at; a cost that cannot be paid is False."""
    pace = Pace(dense=16)
    seen = []
    for step in range(steps):
        if not pace.due(step):
            continue
        if next(costs):
            seen.append(step)
            pace.took(surplus=False)
        else:
            pace.spare()
    return seen


@given(st.randoms(use_true_random=False), st.floats(0, 0.5))
def test_a_poor_rank_shares_steps_with_a_rich_one(random: Any, poverty: float) -> None:
    poor = walk(iter(lambda: random.random() > poverty, None), 5000)
    rich = set(walk(iter(lambda: True, None), 5000))
    late = [step for step in poor if step > 2500]
    assert all(step in rich for step in late if step % 512 == 0)
    assert len(poor) <= len(rich) < 16 * 12


def test_the_first_steps_are_looked_at_one_by_one() -> None:
    seen = walk(iter(lambda: True, None), 1000)
    assert seen[:16] == list(range(16))
    gaps = [after - before for before, after in pairwise(seen)]
    assert gaps == sorted(gaps)
    assert max(gaps) == 32


# -- what a rank writes


class Purse:
    """A budget that holds what it is told."""

    enabled = True

    def __init__(self, left: int) -> None:
        self._left = left

    def left(self) -> int:
        return self._left

    def spend(self, nanoseconds: int) -> None:
        self._left -= nanoseconds


def written_by(
    monkeypatch: pytest.MonkeyPatch, left: int, change: bool = False, moved: int | None = None
) -> tuple[list[Record], torch.nn.Module]:
    """What a rank writes in four steps; between the second and the third a weight is changed.

    Or as many elements are moved by collectives.
    """
    ledger = SimpleNamespace(moved=0) if moved is not None else None
    monkeypatch.setattr(torch_private, "group_ranks", lambda ddp: [0, 1])
    records: list[Record] = []
    tracker = SimpleNamespace(armed=0, steps=0)
    recorder = SimpleNamespace(add=records.append)
    state: Any = SimpleNamespace(
        tracker=tracker, recorder=recorder, budget=Purse(left), ledger=ledger
    )
    model = torch.nn.Linear(3, 2)
    ddp = torch.nn.Module()
    ddp.module = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fingerprints = Fingerprints(state)
    fingerprints.built(ddp)
    for step in range(4):
        model(torch.ones(1, 3)).sum().backward()
        fingerprints.step_begins()
        optimizer.step()
        tracker.steps = tracker.armed = step + 1
        fingerprints.step_ended(optimizer, step)
        if change and step == 1:
            with torch.no_grad():
                model.bias.zero_()
        if ledger is not None and moved is not None and step == 1:
            ledger.moved += moved
    fingerprints.rank_ends()
    return records, model


def test_a_rank_writes_its_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    records, model = written_by(monkeypatch, left=10**12)
    assert [each["kind"] for each in records] == ["tensors", *4 * ["fingerprint"]]
    assert records[0]["names"] == ["weight", "bias"]
    last = records[-1]
    assert last["hyper"] == [[[0.1, 0.9, None, 0]]]
    assert {"gradients", "state", "detail"} <= set(last)
    (_, norm), _ = unpacked(last["detail"])
    assert norm == pytest.approx(float(model.weight.detach().norm()))  # type: ignore[operator]
    assert len({each["parameters"] for each in records[1:]}) == 4


def test_parameters_changed_between_steps_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    records, _ = written_by(monkeypatch, left=10**12, change=True)
    (outside,) = (each for each in records if each["kind"] == "outside")
    assert (outside["step"], outside["names"]) == (1, ["bias"])


@pytest.mark.parametrize(("moved", "expected"), [(7, 0), (8, 1), (1000, 1)])
def test_parameters_are_looked_at_after_collectives_that_may_have_carried_them(
    monkeypatch: pytest.MonkeyPatch, moved: int, expected: int
) -> None:
    records, _ = written_by(monkeypatch, left=10**12, moved=moved)
    looks = [each for each in records if each["kind"] == "together"]
    assert len(looks) == expected
    for look in looks:
        after = next(
            each for each in records if each["kind"] == "fingerprint" and each["step"] == 1
        )
        assert (look["step"], look["parameters"]) == (1, after["parameters"])


def test_a_look_that_is_too_dear_is_told_without_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    records, _ = written_by(monkeypatch, left=0, moved=8)
    assert [(each["kind"], "parameters" in each) for each in records] == [("together", False)]


def test_who_cannot_pay_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written_by(monkeypatch, left=0)[0] == []


# -- rules


def tensors(group: list[int], **more: object) -> Record:
    names = ["first.weight", "second.weight"]
    return {"kind": "tensors", "module": 0, "type": "Net", "group": group, "names": names, **more}


def prints(
    hashes: str, lr: float = 0.1, start: int = 0, armed: int = 1, **more: object
) -> Iterator[Record]:
    """One fingerprint a step; equal letters are equal parameters."""
    for step, letter in enumerate(hashes, start):
        yield {
            "kind": "fingerprint", "step": step, "module": 0, "armed": step + armed,
            "hyper": [[[lr, 0.9, None, 0]]], "parameters": f"{letter}{step}",
            "detail": packed([5 << 32, ord(letter) << 32], [1.0, float(ord(letter))]), **more,
        }  # fmt: skip


SITE = {"kind": "site", "phase": "optimizer", "path": "/job/train.py", "line": 9}


def found(written: Written, *, over: bool = True) -> list[Finding]:
    findings = written.findings(status=0 if over else None)
    return [each for each in findings if each.code in FAMILY]


def ranks(written: Written, *each: list[Record]) -> None:
    for number, records in enumerate(each):
        group = list(range(len(each)))
        written.rank(number, [SITE, tensors(group), *records])


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


def elements(step: int, values: list[float], count: int | None = None) -> Record:
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
    written: Written, other: Record
) -> None:
    ranks(written, [*prints("aaaa"), elements(3, [1.0, 2.0])], [*prints("abbb"), other])
    (finding,) = found(written)
    assert not any("max difference" in line for line in finding.evidence)
    assert any("second.weight: norm" in line for line in finding.evidence)


def suspicion(age: float) -> Record:
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


def together(step: int, letter: str | None) -> Record:
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


@pytest.mark.parametrize(("seen", "expected"), [("aaab", 0), ("aabb", 1)])
def test_a_live_job_needs_a_second_look(written: Written, seen: str, expected: int) -> None:
    ranks(written, list(prints("aaaaaa")), list(prints(seen)))
    assert len(found(written, over=False)) == expected


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


def load(step: int) -> Record:
    return {"kind": "load", "step": step, "module": 0, "path": "/job/train.py", "line": 5}


def test_weights_loaded_on_one_rank_are_the_cause(written: Written) -> None:
    ranks(written, list(prints("aaaa")), [*prints("aabb"), load(2)])
    (finding,) = found(written)
    assert (finding.code, finding.ranks, str(finding.location)) == (
        "DDP319", (1,), "/job/train.py:5",
    )  # fmt: skip


def test_other_weights_loaded_on_every_rank_are_not_one_ranks_fault(written: Written) -> None:
    ranks(written, [*prints("aaaa"), load(2)], [*prints("aabb"), load(2)])
    assert [each.code for each in found(written)] == ["DDP701"]


def test_a_load_before_the_last_equality_is_not_the_cause(written: Written) -> None:
    ranks(written, list(prints("aaaa")), [*prints("aabb"), load(1)])
    assert [each.code for each in found(written)] == ["DDP701"]


def test_parameters_changed_by_hand_on_one_rank(written: Written) -> None:
    outside = {"kind": "outside", "step": 1, "module": 0, "count": 1, "names": ["second.weight"]}
    ranks(written, list(prints("aaaa")), [*prints("aabb"), outside])
    (finding,) = found(written)
    assert (finding.code, finding.ranks) == ("DDP319", (1,))


WRITES = {
    "copy": "if rank == 0:\n    model.weight.copy_(best)\n",
    "assigned": "if rank == 0:\n    p.data = best\n",
    "element": "if rank == 0:\n    model.weight[:] = best\n",
    "init": "if rank == 0:\n    nn.init.zeros_(head)\n",
    "apply": "if dist.get_rank() == 0:\n    model.apply(start)\n",
    "loop": "if rank == 0:\n    [p.data.mul_(2) for p in model.parameters()]\n",
    "helper": "def reset(m):\n    m.weight.zero_()\nif rank == 0:\n    reset(model)\n",
}
NO_WRITES = {
    "everywhere": "model.weight.zero_()\n\n",
    "gradient": "if rank == 0:\n    p.grad.zero_()\n",
    "total": "if rank == 0:\n    total.add_(loss)\n",
    "called everywhere": "def reset(m):\n    m.weight.zero_()\nreset(model)\n",
    "two": WRITES["copy"] + WRITES["init"],
}


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("name", [*WRITES, *NO_WRITES])
def test_the_line_that_changes_weights_on_one_rank(
    written: Written, tmp_path: Path, name: str, seen: bool
) -> None:
    train = tmp_path / "train.py"
    train.write_text({**WRITES, **NO_WRITES}[name])
    at = {"kind": "site", "phase": "forward", "path": str(train), "line": 1}
    outside = {"kind": "outside", "step": 1, "module": 0, "count": 1, "names": ["second.weight"]}
    changed = [*prints("aabb", gradients="g"), *([outside] if seen else [])]
    ranks(written, [at, *prints("aaaa", gradients="g")], changed)
    (finding,) = found(written)
    assert finding.code == ("DDP319" if seen or name in WRITES else "DDP701")
    # By what was seen, else by the condition around the line, if that is known.
    alone = name in WRITES and name != "helper"
    assert finding.ranks == ((1,) if seen else (0,) if alone else (0, 1))
    if name in WRITES:
        assert finding.location is not None and finding.location.path == str(train)
        assert "likely" in finding.message or seen
    elif seen:
        assert finding.location is None


def test_a_change_on_a_rank_is_not_its_own_where_another_has_not_looked(written: Written) -> None:
    outside = {"kind": "outside", "step": 1, "module": 0, "count": 1, "names": ["second.weight"]}
    sparse = [each for each in prints("aaaa") if each["step"] != 1]
    ranks(written, sparse, [*prints("aabb"), outside])
    assert [each.code for each in found(written)] == ["DDP701"]


def test_a_difference_of_learning_rates_is_said_once_with_its_consequence(
    written: Written,
) -> None:
    cut = {"kind": "cut", "step": 3, "path": "/job/train.py", "line": 7}
    mine = [*prints("aaa"), *prints("bbb", lr=0.01, start=3), cut]
    ranks(written, list(prints("aaaaaa")), mine)
    (finding,) = found(written)
    assert (finding.code, finding.ranks, str(finding.location)) == (
        "DDP702", (1,), "/job/train.py:7",
    )  # fmt: skip
    assert "0.1 on rank 0, 0.01 on rank 1" in finding.message
    assert "the parameters differ since step 3" in finding.evidence


def test_a_schedule_that_all_ranks_follow_is_no_difference(written: Written) -> None:
    both = [*prints("aaa"), *prints("bbb", lr=0.01, start=3)]
    ranks(written, both, both)
    assert found(written) == []


RESUME = {"kind": "resume", "step": 0, "path": "/job/train.py", "line": 4, "what": "SGD"}


@pytest.mark.parametrize(("resumed", "expected"), [((0,), "DDP703"), ((0, 1), "DDP701")])
def test_an_optimizers_state_that_one_rank_loaded(
    written: Written, resumed: tuple[int, ...], expected: str
) -> None:
    each = [
        [*([RESUME] if rank in resumed else []), *prints("ab"[rank] * 4, state="xy"[rank])]
        for rank in (0, 1)
    ]
    ranks(written, *each)
    assert [each.code for each in found(written)] == [expected]


def test_scales_that_differ_are_the_cause(written: Written) -> None:
    ranks(written, list(prints("aaaa", scale=4.0)), list(prints("bbbb", scale=8.0)))
    (finding,) = found(written)
    assert (finding.code, finding.ranks) == ("DDP705", (0, 1))


def test_scales_that_follow_other_parameters_are_not(written: Written) -> None:
    mine = [*prints("ab", scale=8.0), *prints("bb", start=2, scale=4.0)]
    ranks(written, list(prints("aaaa", scale=8.0)), mine)
    assert [each.code for each in found(written)] == ["DDP701"]


def stepped(backwards: list[int], armed: list[int]) -> list[Record]:
    """Steps with their backwards, and fingerprints that all differ from the second one on."""
    step = dict.fromkeys(("data", "forward", "backward", "optimizer", "other", "wait"), 1)
    steps: list[Record] = [
        {"kind": "step", "step": number, "start": T0, **step, "total": 6, "split": True,
         "backwards": count}
        for number, count in enumerate(backwards)
    ]  # fmt: skip
    prints_of = zip(prints("a" * len(armed)), armed, strict=True)
    return [*steps, *({**each, "armed": count} for each, count in prints_of)]


@pytest.mark.parametrize(
    ("mine", "armed", "codes"),
    [
        ([1, 1, 2, 1, 1], [1, 2, 4, 5, 6], ["DDP403"]),
        # A backward of its own, which was not reduced.
        ([1, 1, 2, 1, 1], [1, 2, 3, 4, 5], []),
        ([1, 1, 1, 1, 1], [1, 2, 3, 4, 5], []),
        # A step without a backward.
        ([1, 1, 0, 1, 1], [1, 2, 2, 3, 4], []),
    ],
)
def test_a_step_that_one_rank_left_out(
    written: Written, mine: list[int], armed: list[int], codes: list[str]
) -> None:
    ranks(written, stepped([1] * 5, [1, 2, 3, 4, 5]), stepped(mine, armed))
    findings = found(written)
    assert [each.code for each in findings] == codes
    assert not codes or findings[0].ranks == (1,)


def nonfinite(step: int) -> Record:
    return {"kind": "nonfinite", "time": T0, "step": step, "loss": "nan"}


BACKWARD = {**SITE, "phase": "backward", "line": 8}


def poisoned(step: int) -> list[Record]:
    """Fingerprints of parameters that are not finite any more after a step."""
    bad: dict[str, Any] = {"detail": packed([0, 0], [1.0, float("nan")])}
    return [*prints("a" * step), *prints("bb", start=step, **bad)]


def test_the_rank_with_the_first_nan_is_named(written: Written) -> None:
    for rank, steps in enumerate(((4, 5), (3, 4))):
        written.rank(rank, [BACKWARD, tensors([0, 1]), *poisoned(3), *map(nonfinite, steps)])
    (finding,) = found(written, over=False)
    assert (finding.code, finding.ranks) == ("DDP706", (1,))


def test_a_nan_that_no_parameter_took_is_no_fault(written: Written) -> None:
    ranks(written, [*prints("aaaaaa")], [*prints("aaaaaa"), nonfinite(3)])
    assert found(written) == []


def test_who_was_first_is_open_until_all_have_written(written: Written) -> None:
    ranks(written, [*prints("a"), nonfinite(4), nonfinite(5)], [*prints("a")])
    assert found(written, over=False) == []


def test_a_gradient_that_overflowed_is_told_by_its_parameters(written: Written) -> None:
    bad: dict[str, Any] = {"detail": packed([0, 0], [1.0, float("inf")])}
    for rank in (0, 1):
        records = [*prints("aa"), *prints("b", start=2, **bad), nonfinite(3), nonfinite(4)]
        written.rank(rank, [BACKWARD, tensors([0, 1]), *records])
    (finding,) = found(written)
    assert finding.code == "DDP706"
    assert "second.weight is not finite after step 2" in finding.message


@pytest.mark.parametrize("spread", [False, True])
def test_a_nan_in_the_last_step_is_told_by_the_parameters(written: Written, spread: bool) -> None:
    ranks(written, [*prints("aaaaaa")], [*prints("aaaaaa"), {**nonfinite(7), "spread": spread}])
    assert [each.ranks for each in found(written)] == ([(1,)] if spread else [])


def test_where_a_loss_became_nan_is_told(written: Written) -> None:
    infinite = {"what": "operation", "operations": ["log"], "module": "fc", "within": False}
    origin = {"what": "operation", "operations": ["mul"], "module": "head", "within": True}
    mine = {**nonfinite(3), "origin": {**origin, "infinite": infinite}}
    written.rank(0, [BACKWARD, tensors([0, 1]), *poisoned(3)])
    written.rank(1, [BACKWARD, tensors([0, 1]), *poisoned(3), mine])
    (finding,) = found(written)
    assert finding.message.endswith("before any other rank's; it began behind module fc")
    assert finding.evidence[0].endswith("the first infinite value came out of log behind module fc")


def test_lines_that_may_be_it_are_all_named(written: Written, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("loss = model(batch)\nloss = loss * a\nloss = loss * b\nloss.backward()\n")
    sites = [
        {**SITE, "path": str(script), "phase": phase, "line": line}
        for phase, line in (("forward", 1), ("backward", 4))
    ]
    origin = {"what": "input", "operations": ["mul"], "module": "head", "within": False}
    records = [*sites, tensors([0, 1]), *poisoned(3)]
    written.rank(0, [*records, {**nonfinite(3), "origin": origin}])
    written.rank(1, records)
    (finding,) = found(written)
    both = f"in `loss = loss * a` {script.name}:2 or in `loss = loss * b` {script.name}:3"
    assert finding.message.endswith(f"it began {both}")
    assert finding.evidence[0] == "either of these lines may be it"


def nonfinite_gradient(step: int) -> Record:
    return {"kind": "nonfinite_gradient", "time": T0, "step": step, "names": ["first.bias"]}


def test_the_rank_whose_own_gradient_overflowed_is_named(written: Written) -> None:
    for rank, step in enumerate((4, 3)):
        records = [*poisoned(3), nonfinite_gradient(step), nonfinite(4), nonfinite(5)]
        written.rank(rank, [BACKWARD, tensors([0, 1]), *records])
    (finding,) = found(written)
    assert (finding.code, finding.ranks) == ("DDP706", (1,))
    assert "the gradient of first.bias on rank 1 is not finite at step 3" in finding.message


def test_what_did_no_harm_before_is_not_blamed(written: Written) -> None:
    """All ranks skipped rank 1's step 2; what lasts came from rank 0."""
    mine = [nonfinite_gradient(2), nonfinite(2), nonfinite(7), nonfinite(8)]
    theirs = [nonfinite_gradient(6), nonfinite(6), nonfinite(7), nonfinite(8)]
    for rank, records in enumerate((theirs, mine)):
        written.rank(rank, [BACKWARD, tensors([0, 1]), *poisoned(6), *records])
    (finding,) = found(written)
    assert finding.ranks == (0,)
    assert "the loss of rank 0 is nan at step 6" in finding.message


def test_steps_that_the_job_itself_skipped_are_no_fault(written: Written) -> None:
    bad = [nonfinite(step) for step in (2, 3, 4)]
    ranks(written, [*prints("aaaaaa"), *bad], [*prints("aaaaaa"), *bad])
    assert found(written) == []


def test_losses_that_stay_so_on_all_ranks_need_no_fingerprint(written: Written) -> None:
    """With a budget of 0 there is none."""
    for rank, first in enumerate((4, 3)):
        bad = [nonfinite(step) for step in range(first, 8)]
        written.rank(rank, [BACKWARD, tensors([0, 1]), *bad])
    (finding,) = found(written)
    assert finding.ranks == (1,)


def test_a_gradient_that_was_not_stepped_with_is_no_fault(written: Written) -> None:
    ranks(written, [*prints("aaaaaa")], [*prints("aaaaaa"), nonfinite_gradient(3)])
    assert found(written) == []


def buffers(values: list[list[float]], *, broadcast: bool, start: int = 0) -> Iterator[Record]:
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


BUILT = {"kind": "ddp", "path": "/job/train.py", "line": 2}


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


def model(parameters: list[list[object]], group: list[int] | None = None) -> Record:
    return {
        "kind": "model", "number": 0, "type": "Net", "group": group or [0, 1],
        "parameters": parameters, "count": len(parameters), "path": "/job/train.py", "line": 3,
    }  # fmt: skip


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


def test_models_are_compared_once_all_ranks_have_one(written: Written) -> None:
    for rank, records in enumerate(([model([ONE])], [model([OTHER, ONE])], [])):
        written.rank(rank, [{**each, "group": [0, 1, 2]} for each in records])
    assert found(written, over=False) == []


def evaluation(armed: int) -> Record:
    return {
        "kind": "evaluation", "armed": armed, "group": [0, 1], "buffers": 3, "type": "Net",
        "path": "/job/train.py", "line": 6,
    }  # fmt: skip


def test_an_evaluation_of_rank_0_alone(written: Written) -> None:
    ranks(written, [*prints("aaaa"), evaluation(2)], [*prints("aaaa")])
    (finding,) = found(written, over=False)
    assert (finding.code, finding.ranks) == ("DDP402", (0,))


def test_a_rank_that_has_not_come_to_the_evaluation_yet_is_waited_for(written: Written) -> None:
    ranks(written, [*prints("aaaa"), evaluation(4)], [*prints("aaaa")])
    assert found(written, over=False) == []


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


def test_damaged_records_are_passed_over(tmp_path: Path) -> None:
    written = Written(tmp_path)
    damaged: list[Record] = [
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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("if rank == 0:\n    group['lr'] *= 2\n", 2),
        ("if rank == 0:\n    optimizer.param_groups[0]['lr'] = 1.0\n", 2),
        ("optimizer.param_groups[0]['lr'] = 1.0\n", None),
        ("if rank == 0:\n    settings['lr'] = 1.0\n    group['lr'] = 1.0\n", None),
    ],
)
def test_the_line_that_sets_another_learning_rate_on_one_rank(
    written: Written, tmp_path: Path, text: str, line: int | None
) -> None:
    train = tmp_path / "train.py"
    train.write_text(text)
    at = {"kind": "site", "phase": "optimizer", "path": str(train), "line": 9}
    rates = ([[[0.1, 0, None, 0]]], [[[0.2, 0, None, 0]]])
    for number, rate in enumerate(rates):
        first = {"kind": "fingerprint", "step": 0, "module": 0, "armed": 1, "parameters": "a"}
        lines = [{**first, "hyper": rates[1]}]
        lines += [{**first, "step": step, "armed": step + 1, "hyper": rate} for step in (1, 2)]
        written.rank(number, [SITE, at, tensors([0, 1]), *lines])
    (finding,) = found(written)
    assert (finding.code, finding.ranks) == ("DDP702", (0,))
    place = finding.location
    assert place is not None and place.line == (9 if line is None else line)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("if rank == 0:\n    group['lr'] *= 2\n", (0,)), ("group['lr'] *= 2\n", (0, 1))],
)
def test_under_a_scheduler_the_line_says_who_changed_the_learning_rate(
    written: Written, tmp_path: Path, text: str, ranks: tuple[int, ...]
) -> None:
    train = tmp_path / "train.py"
    train.write_text(text)
    at = {"kind": "site", "phase": "optimizer", "path": str(train), "line": 9}
    for number, changed in enumerate((0.16, 0.08)):
        prints_of = {"kind": "fingerprint", "module": 0, "parameters": "a"}
        rates = [0.1, 0.09, changed]
        lines = [
            {**prints_of, "step": step, "armed": step + 1, "hyper": [[[rate, 0, None, 0]]]}
            for step, rate in enumerate(rates)
        ]
        written.rank(number, [SITE, at, tensors([0, 1]), *lines])
    (finding,) = found(written)
    assert (finding.code, finding.ranks) == ("DDP702", ranks)
