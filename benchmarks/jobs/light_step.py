"""Light steps as torch calls their hooks, without torch: for counting what the hooks execute.

    python benchmarks/jobs/light_step.py COUNT awake|asleep

Nothing else happens in these steps, so what they take beyond those with sleeping hooks is theirs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from ddpdoctor.probe.hooks import ddp as ddp_hook
from ddpdoctor.probe.hooks import training
from ddpdoctor.probe.observers.steps import StepTracker
from ddpdoctor.probe.runtime import hot, rank, wrapping
from ddpdoctor.run.status import StatusPage

ALL_LIGHT = (1 << 30) - 1


class Optimizer:
    """What a step is known by."""


class Wrapped:
    """What the forward hook asks of a DDP module."""

    require_backward_grad_sync = True


class Iterator:
    """What the hooks of a loader ask of its iterator."""

    _num_yielded = 1
    _sampler_iter = 0

    def _next_data(self) -> None:
        self._next_index()

    def _next_index(self) -> None:
        pass


@contextmanager
def of_ddp(module: Any) -> Generator[None]:
    """DDP's own context around a forward."""
    yield


def main() -> None:
    """Make so many steps."""
    count, awake = int(sys.argv[1]), sys.argv[2] == "awake"
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "status")
        page = StatusPage(path, rank=0, world_size=1, local_rank=0, restart=0, started=1)
        recorder: Any = SimpleNamespace(page=page, add=lambda _: None, each_round=[], dropped=0)
        tracker = StepTracker(recorder, lambda: True)
        steps(tracker, count, awake)


def steps(tracker: StepTracker, count: int, awake: bool) -> None:
    """The steps, with the hooks awake or asleep."""
    torch: Any = SimpleNamespace(is_grad_enabled=lambda: True, compiler=SimpleNamespace())
    sys.modules["torch"] = torch
    hot.use_torch(torch)
    ddp_hook._grad_enabled = torch.is_grad_enabled
    inside: Any = ddp_hook._Forward if hot.core is None else hot.core.Forward
    module, optimizer = Wrapped(), Optimizer()
    autograd: Any = SimpleNamespace(engine=lambda *_, **__: None)
    begin, end = training._backward_begins, training._backward_ended
    wrapping.around(autograd, "engine", "backward", begin, end, light="engine")
    wanted, came = training._batch_wanted, training._batch_came
    wrapping.around(Iterator, "_next_data", "dataloader", wanted, came, light="batch")
    wanted, drawn = training._indices_wanted, training._indices_drawn
    wrapping.around(Iterator, "_next_index", "indices", wanted, drawn, light="indices")
    batches: Any = Iterator()
    batches._ddpdoctor_pass = (Iterator._sampler_iter, None)
    # A graph that does not end soon, as that of a model.
    node: Any = SimpleNamespace()
    node.next_functions = ((node, 0),)
    tensors = (SimpleNamespace(numel=lambda: 2, grad_fn=node),)

    def step() -> None:
        batches._next_data()
        context = of_ddp(module)
        with context if rank.active is None else inside(module, context, ddp_hook._before):
            pass
        autograd.engine(tensors, accumulate_grad=True)
        around_step()

    def around_step() -> None:
        training._step_begins(optimizer, (), {})
        training._step_ended(optimizer, (), {})

    rank.active = tracker
    step()
    tracker.detail.choose = lambda *_: None  # type: ignore[method-assign]
    tracker.sparse = tracker.line = ALL_LIGHT
    tracker.steps, tracker.light = 1, 2
    tracker.looped = id(batches)
    rank.active = tracker if awake else None
    for _ in range(count):
        step()


if __name__ == "__main__":
    main()
