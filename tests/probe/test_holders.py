"""What a rank's names reach, and what of it grows between two looks."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddpdoctor.probe.observers import holders
from ddpdoctor.probe.observers.holders import Scan, merged, weighs, weightiest
from ddpdoctor.probe.runtime import torch_memory
from ddpdoctor.run.records.memory import Holder

KEPT: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a look take its time: a busy core would end it before it has seen all."""
    monkeypatch.setattr(holders, "MAX_SCAN_NS", 60_000_000_000)


@functools.lru_cache(maxsize=None)  # noqa: UP033 (as people write it)
def masks(step: int) -> Any:
    return torch.ones(64, 64)


def found(step: Callable[[int], object], looks: int = 3) -> dict[str, Holder]:
    """What grows while a function of the job is called again and again."""
    sizes: dict[holders.Place, holders.Noted] | None = None
    grown: dict[holders.Place, Holder] = {}
    for number in range(looks):
        for each in range(4):
            step(4 * number + each)
        look = Scan(sys._getframe(1), sizes)
        grown = merged(grown, look) if sizes is not None else grown
        sizes = look.sizes
    return {each.name: each for each in weightiest(grown) if weighs(each)}


def test_a_list_of_losses_is_found_with_their_graphs() -> None:
    hist: list[Any] = []
    numbers = []

    def step(number: int) -> None:
        loss = (torch.ones(4, requires_grad=True) * 2).sum()
        hist.append(loss)
        numbers.append(loss.item())

    holder = found(step)["hist"]
    assert (holder.name, holder.sort, holder.graph, holder.holds) == (
        "hist",
        "list",
        True,
        "Tensor",
    )
    assert (holder.size, holder.grew) == (12, 8)
    assert holder.at.path == __file__
    assert holder.at.function == "test_a_list_of_losses_is_found_with_their_graphs"


def test_a_sum_that_keeps_graphs_is_found_by_its_chain() -> None:
    total = torch.zeros(())

    def step(number: int) -> None:
        nonlocal total
        total = total + (torch.ones(4, requires_grad=True) * 2).sum()

    holder = found(step)["total"]
    assert (holder.sort, holder.size, holder.grew) == ("graph", 12, 8)


def test_a_hidden_state_that_is_not_detached_is_found() -> None:
    cell = nn.Linear(4, 4)
    state = torch.zeros(1, 4)

    def step(number: int) -> None:
        nonlocal state
        state = torch.tanh(cell(state))

    assert found(step)["state"].sort == "graph"


def test_a_tensor_on_a_module_is_found() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.inner.seen = torch.zeros(0, 4096)

    model = Net()

    def step(number: int) -> None:
        model.inner.seen = torch.cat([model.inner.seen, torch.ones(64, 4096)])  # type: ignore[list-item]

    assert found(step)["model.inner.seen"].sort == "tensor"


def test_caches_and_entries_of_dictionaries_are_found() -> None:
    def step(number: int) -> None:
        KEPT[number, "x"] = torch.ones(256, 1024)
        masks(number)
        KEPT.setdefault("by name", []).append(torch.ones(256, 1024))

    grown = found(step)
    assert grown["KEPT"].each == 1 << 20
    assert grown["masks"].sort == "cache"
    assert "KEPT['by name']" in grown
    KEPT.clear()


def test_hooks_are_found_with_what_they_keep() -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    def step(number: int) -> None:
        batch = torch.ones(1024, 1024)
        model[0].register_forward_hook(lambda module, inputs, output: batch.sum())

    holder = found(step)["model.0._forward_hooks"]
    assert (holder.sort, holder.each is not None and holder.each > 1 << 22) == ("hooks", True)


def test_a_closure_and_slots_are_followed() -> None:
    class Meter:
        __slots__ = ("values",)

        def __init__(self) -> None:
            self.values: list[Any] = []

    meter = Meter()
    step = lambda number: meter.values.append(torch.ones(512, 1024))  # noqa: E731
    assert "meter.values" in found(step) or "step.meter.values" in found(step)


def test_a_maximum_size_is_recorded() -> None:
    class Replay:
        def __init__(self) -> None:
            self.capacity = 500
            self.items: list[Any] = []

    replay, ring = Replay(), deque[Any](maxlen=300)

    def step(number: int) -> None:
        replay.items.append(torch.ones(512, 1024))
        ring.append(torch.ones(512, 1024))

    grown = found(step)
    assert grown["replay.items"].bound == 500
    assert grown["ring"].bound == 300


def test_what_shrinks_in_between_leaves() -> None:
    outputs: list[Any] = []

    def step(number: int) -> None:
        outputs.append(torch.ones(512, 1024))
        if number % 6 == 5:
            outputs.clear()

    assert found(step, looks=4) == {}


def test_a_look_keeps_nothing_alive_and_calls_nothing() -> None:
    class Touchy:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

        @property
        def value(self) -> int:
            raise AssertionError

    class Thing:
        pass

    def job() -> weakref.ref[Thing]:
        thing, touchy = Thing(), Touchy()
        Scan(sys._getframe())
        return weakref.ref(thing) if type(touchy) is Touchy else weakref.ref(Thing())

    gc.disable()
    try:
        reference = job()
        assert reference() is None
    finally:
        gc.enable()


def test_variables_that_the_job_has_asked_for_stay() -> None:
    value = 7
    mine = locals()
    Scan(sys._getframe())
    assert mine["value"] == value


def test_a_look_takes_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "MAX_SCAN_NS", 0)
    look = Scan(sys._getframe())
    assert not look.complete


def test_a_large_container_is_not_walked() -> None:
    many = [[number] for number in range(100_000)]
    sizes = Scan(sys._getframe()).sizes
    (noted,) = [noted for place, noted in sizes.items() if place.name == "many"]
    assert noted.size == len(many)


def test_links_of_a_deep_model_are_those_of_one_step() -> None:
    value = torch.ones(4, requires_grad=True)
    for _ in range(20):
        value = value + 1
    assert torch_memory.links_of(value) == 20
    assert torch_memory.links_of(value * 2) == 1
