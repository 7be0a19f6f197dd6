"""Light steps and collectives in the compiled core: what becomes of lines, Ctrl-C and memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.probe.hooks import training
from ddpdoctor.probe.runtime import events, hot, rank, shield, sites, wrapping
from ddpdoctor.run.ring import SIZE as RING_SIZE
from ddpdoctor.run.status import Phase
from tests.support.probed import page_of_memory

pytestmark = pytest.mark.skipif(hot.core is None, reason="the core is not compiled here")


class Light(hot.Phases):
    """A rank whose step under way is light, and the calls that hooks follow in it."""

    def __init__(self) -> None:
        super().__init__(page_of_memory())
        self.light, self.sparse, self.line, self.steps = 1, 63, 63, 1
        self.optimizer = SimpleNamespace()
        self.closer = id(self.optimizer)
        self.optimizer_code = compile("0", "/torch/optim/optimizer.py", "exec")
        self.fetch: Callable[..., None]
        self.ddp = SimpleNamespace(require_backward_grad_sync=True)
        self.iterator = SimpleNamespace(_num_yielded=3, _ddpdoctor_epoch=5)
        self.detail = SimpleNamespace(charge=lambda began: None)
        self.in_python: list[tuple[object, ...]] = []  # what was left to the Python hooks

    def forward(self) -> None:
        """A forward of a DDP module."""
        with hot.core.Forward(self.ddp, contextlib.nullcontext(), None):
            pass

    def backward(self) -> None:
        """A call of autograd's engine."""
        engine = SimpleNamespace(run=lambda tensors, accumulate_grad: None)
        wrapping.around(engine, "run", "backward", lambda *_: None, lambda *_: None, light="engine")
        engine.run((), accumulate_grad=True)

    def batch(self, fetch: Callable[..., object] = lambda iterator: "batch") -> None:
        """A batch of a loader."""
        loader = SimpleNamespace(fetch=fetch)

        def begin(*given: object) -> None:
            self.in_python.append(given)

        def end(*given: object) -> None:
            self.in_python.append(given)

        wrapping.around(loader, "fetch", "dataloader", begin, end, light="batch")
        loader.fetch(self.iterator)

    def step(self) -> None:
        """An optimizer's step."""
        assert hot.step_begins(self.optimizer)
        assert hot.step_ended(self.optimizer)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> Light:
    """That rank, which this process is."""
    one = Light()
    monkeypatch.setattr(rank, "active", one)
    monkeypatch.setattr(shield, "faults", [])
    hot.use_torch(torch)
    return one


def test_a_line_that_is_taken_for_once_after_many_steps_is_seen(light: Light) -> None:
    engine = SimpleNamespace(run=lambda tensors, accumulate_grad: None)
    wrapping.around(engine, "run", "backward", lambda *_: None, lambda *_: None, light="engine")
    lines: set[int] = set()
    for light.steps in range(200):
        if light.steps == 150:
            engine.run((), accumulate_grad=True)
        else:
            engine.run((), accumulate_grad=True)
        lines.add(light.backwards[-1][2].line)
    assert len(lines) == 2


def interrupted(*_: object) -> None:
    """Ctrl-C while code of ours runs."""
    raise KeyboardInterrupt


MOMENTS = {
    "forward_begins": "forward",
    "batch_fetched": "batch",
    "loop_turns": "batch",
    "backward_begins": "backward",
    "backward_ended": "backward",
    "step_begins": "step",
    "step_ended": "step",
}
"""By which call of a light step who has subscribed to them is called."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_who_has_subscribed_to_a_moment_of_a_light_step_is_called(
    light: Light, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "forward_begins": (light.ddp, True),
        "batch_fetched": (light.iterator, "batch"),
        "loop_turns": (light.iterator,),
        "backward_begins": (),
        "backward_ended": (),
        "step_begins": (light.optimizer,),
        "step_ended": (light.optimizer, light.steps),
    }
    called: list[tuple[object, ...]] = []
    monkeypatch.setattr(events, moment, (lambda *given: called.append(given),) * 2)
    getattr(light, MOMENTS[moment])()
    assert called == [given[moment]] * 2
    assert light.phase == Phase.OTHER


def test_a_batch_of_a_light_step_is_followed_in_compiled_code(light: Light) -> None:
    light.batch()
    assert (light.phase, light.epoch, light.aside) == (Phase.OTHER, 5, True)
    assert light.iterators == {id(light.iterator)}
    assert light.in_python == []


def test_batches_that_only_continue_a_loop_are_counted(
    light: Light, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[object] = []
    monkeypatch.setattr(events, "loop_turns", (turns.append,))
    light.looped = id(light.iterator)
    for _ in range(3):
        light.backward()
        light.batch()
    assert (light.loop_batches, turns) == (3, [])
    light.batch()
    assert (light.loop_batches, turns) == (3, [light.iterator]), "no backward came in between"


def test_a_batch_without_gradients_is_one_of_an_evaluation(
    light: Light, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for moment in ("batch_fetched", "batch_evaluated", "loop_turns"):
        monkeypatch.setattr(events, moment, (lambda *_, name=moment: called.append(name),))
    with torch.no_grad():
        light.batch()
    assert called == ["batch_fetched", "batch_evaluated"]


def test_the_first_batch_and_those_of_a_loader_aside_are_left_to_python(light: Light) -> None:
    light.iterator._num_yielded = 0
    light.batch()
    assert light.in_python.pop() == (light.iterator,)
    light.iterator._num_yielded, light.trained, light.aside = 1, {id(light.iterator)}, True
    light.batch()
    assert light.in_python == [(light.iterator,)]


def test_the_end_of_a_loader_is_left_to_python(light: Light) -> None:
    def ended(iterator: object) -> None:
        raise StopIteration

    with pytest.raises(StopIteration):
        light.batch(ended)
    ((iterator, result, error),) = light.in_python
    assert (iterator, result, type(error)) == (light.iterator, None, StopIteration)


@pytest.mark.parametrize(("known", "told"), [((7, None), 0), ((6, None), 1), ((7, "pass"), 1)])
def test_indices_of_a_pass_that_is_not_followed_are_left_alone(
    light: Light, known: tuple[int, object], told: int
) -> None:
    iterator = SimpleNamespace(_sampler_iter=7, _ddpdoctor_pass=known, draw=lambda: None)
    ends: list[object] = []
    loader = SimpleNamespace(draw=lambda iterator: 4)
    wrapping.around(
        loader, "draw", "indices", lambda iterator: iterator, lambda *given: ends.append(given),
        light="indices",
    )  # fmt: skip
    assert loader.draw(iterator) == 4
    assert ends == [(iterator, 4, None)] * told


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_at_a_moment_of_a_light_step_is_the_jobs(
    light: Light, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, moment, (interrupted,))
    with pytest.raises(KeyboardInterrupt):
        getattr(light, MOMENTS[moment])()
    assert (shield.faults, shield.off) == ([], set())


def test_ctrl_c_where_a_line_is_written_down_is_the_jobs(
    light: Light, monkeypatch: pytest.MonkeyPatch
) -> None:
    light.forward()
    assert light.phase == Phase.OTHER
    monkeypatch.setattr(Light, "site_met", interrupted, raising=False)
    sites.forget()
    with pytest.raises(KeyboardInterrupt):
        light.forward()
    assert (shield.faults, shield.off) == ([], set())


class Written(hot.Calls):
    """A ledger that knows of each call what is stored of it."""

    def __init__(self) -> None:
        super().__init__(bytearray(RING_SIZE))
        self.group = SimpleNamespace(calls=0)
        self.interrupted = False

    def like(self, name: str, tensor: Any, *_: Any) -> Any:
        """What is stored of a call that was just written down."""
        return self.group, bytes(32), tensor.dtype, tensor.shape, tensor.numel()

    def returned(self, order: int, result: object) -> None:
        """The call returned."""
        if self.interrupted:
            interrupted()


def collective(function: Callable[..., Any], first: bool = False) -> Callable[..., Any]:
    """A collective of one parameter, as compiled code follows it."""
    names, places = ("tensor", "", "", "", "", ""), (0, -1, -1, -1, -1, -1)
    in_python = hot.core.Around(function, "a hook", lambda *_: True, lambda *_: None)
    followed = hot.core.Collective(
        "all_reduce", function, in_python, names, places, first, False
    ).call
    return lambda *args: followed(args, {})


def test_a_list_that_is_emptied_while_its_collective_runs_is_no_harm(light: Light) -> None:
    light.calls = Written()
    call = collective(lambda tensors: tensors.clear(), first=True)
    for _ in range(9):
        given = [torch.zeros(3)]
        freed = weakref.ref(given[0])
        assert call(given) is None
        assert freed() is None
    assert light.calls.count > 4, "Python may move the instruction once, as it specializes it"
    assert call([]) is None
    assert shield.faults == []


def test_what_is_known_of_a_collective_may_be_forgotten_while_it_begins(
    light: Light, monkeypatch: pytest.MonkeyPatch
) -> None:
    light.calls = Written()
    names, places = ("tensor", "", "", "", "", ""), (0, -1, -1, -1, -1, -1)
    in_python = hot.core.Around(lambda _: None, "a hook", lambda *_: True, lambda *_: None)
    followed = hot.core.Collective(
        "all_reduce", lambda _: None, in_python, names, places, False, False
    )
    monkeypatch.setattr(Light, "site_met", lambda *_: followed.forget(), raising=False)
    for _ in range(20):
        followed.call((torch.zeros(3),), {})
    assert light.calls.count > 4
    assert light.calls.group.calls == light.calls.count


def test_ctrl_c_within_a_collective_is_the_jobs(light: Light) -> None:
    written = light.calls = Written()
    call, tensor = collective(lambda _: "work"), torch.zeros(3)

    def calls(interrupts: bool) -> None:
        # Only calls of one place are like the last one.
        for written.interrupted in (False, False, interrupts):
            assert call(tensor) == "work"

    with pytest.raises(KeyboardInterrupt):
        calls(True)
    assert written.count == 2
    assert (shield.faults, light.phase, light.collective) == ([], Phase.OTHER, "")


@pytest.mark.parametrize(("epoch", "shown"), [(7, 7), (1 << 63, -1), ("7", -1)])
def test_an_epoch_that_is_no_number_of_eight_bytes_is_none(
    light: Light, epoch: object, shown: int
) -> None:
    light.fetch = lambda *_: None
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(1)))
    sampler: Any = data.sampler
    sampler.epoch = epoch
    iterator = iter(data)
    assert training._batch_wanted(iterator) is iterator
    assert light.epoch == shown
