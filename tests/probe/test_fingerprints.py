"""Fingerprints of parameters: hashes of tensors, and the steps at which ranks write them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpdoctor.diagnose.replicas.differences import unpacked
from ddpdoctor.probe.observers import fingerprints
from ddpdoctor.probe.observers.ddp_modules import Replicas
from ddpdoctor.probe.observers.fingerprints import Fingerprints, packed, tensor_norms
from ddpdoctor.probe.observers.overhead import Pace
from ddpdoctor.probe.observers.readback import PIECE, Readback, hash_of, hashable
from ddpdoctor.probe.runtime import torch_groups
from ddpdoctor.run.records.base import JsonObject
from tests.support.probed import Purse, a_rank

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


def test_bits_that_compare_equal_differ() -> None:
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
    norms = tensor_norms(tensors)
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


class Carried:
    """A ledger, as far as it tells who waits for it what collectives have carried."""

    def watch(self, elements: int, moved: Callable[[int], None]) -> None:
        self.enough, self.moved = elements, moved

    def carry(self, elements: int) -> None:
        if 0 < self.enough <= elements:
            self.moved(elements)


def written_by(
    monkeypatch: pytest.MonkeyPatch, left: int, change: bool = False, moved: int | None = None
) -> tuple[list[JsonObject], torch.nn.Module]:
    """What a rank writes in four steps; between the second and the third a weight is changed.

    Or as many elements are moved by collectives.
    """
    ledger: Any = Carried() if moved is not None else None
    monkeypatch.setattr(torch_groups, "group_ranks", lambda ddp: [0, 1])
    records: list[JsonObject] = []
    state = a_rank(records, Purse(left))
    tracker: Any = state.tracker
    state.ledger = ledger
    model = torch.nn.Linear(3, 2)
    ddp = torch.nn.Module()
    ddp.module = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replicas = Replicas(state)
    fingerprints = Fingerprints(state, replicas)
    replicas.ddp_built(ddp)
    fingerprints.ddp_built(ddp)
    for step in range(4):
        model(torch.ones(1, 3)).sum().backward()
        fingerprints.step_begins(optimizer)
        optimizer.step()
        tracker.steps = tracker.armed = step + 1
        fingerprints.step_ended(optimizer, step)
        if change and step == 1:
            with torch.no_grad():
                model.bias.zero_()
        if ledger is not None and moved is not None and step == 1:
            ledger.carry(moved)
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


@pytest.mark.parametrize(("interval", "charged"), [(1, 0), (4, fingerprints.NEXT_STEP_COST)])
def test_the_step_behind_one_is_charged_once_they_are_rare(
    monkeypatch: pytest.MonkeyPatch, interval: int, charged: int
) -> None:
    monkeypatch.setattr(torch_groups, "group_ranks", lambda ddp: [0, 1])
    monkeypatch.setattr(fingerprints, "clock", lambda: 0)
    state = a_rank([], Purse(10**12))
    tracker: Any = state.tracker
    ddp = torch.nn.Module()
    ddp.module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
    replicas = Replicas(state)
    one = Fingerprints(state, replicas)
    replicas.ddp_built(ddp)
    one.pace.interval = interval
    for tracker.steps in (1, 2):
        one.step_begins(optimizer)
        one.step_ended(optimizer, tracker.steps - 1)
    one.step_begins(optimizer)
    one.step_begins(optimizer)
    assert 10**12 - state.budget.left() == charged


def test_who_cannot_pay_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written_by(monkeypatch, left=0)[0] == []


@pytest.mark.parametrize(("slow", "taken"), [(True, [16, 32]), (False, [])])
def test_a_few_are_taken_beyond_the_budget_if_steps_are_long(
    monkeypatch: pytest.MonkeyPatch, slow: bool, taken: list[int]
) -> None:
    monkeypatch.setattr(torch_groups, "group_ranks", lambda ddp: [0, 1])
    now = itertools.count(0, 10**10 if slow else 1)
    monkeypatch.setattr(fingerprints, "time", SimpleNamespace(monotonic_ns=lambda: next(now)))
    records: list[JsonObject] = []
    purse = Purse(0)
    state = a_rank(records, purse)
    tracker: Any = state.tracker
    ddp = torch.nn.Module()
    ddp.module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
    replicas = Replicas(state)
    one = Fingerprints(state, replicas)
    replicas.ddp_built(ddp)
    one.ddp_built(ddp)
    for step in range(40):
        tracker.steps = step + 1
        one.step_ended(optimizer, step)
    assert [each["step"] for each in records if each["kind"] == "fingerprint"] == taken
    assert purse.held == 0
