"""Hash the buffers that DDP does not broadcast: they may differ between ranks.

Before a forward, DDP broadcasts all buffers of rank 0, including replaced ones. Then they
are equal, but all ranks have to take part in the broadcast. Without gradients, DDP broadcasts only
before the first forward after a training step. It does not broadcast if the user turned that off,
or if the module had no buffers when DDP was built.

Integers (counters, positions, states of generators) and buffers outside the state dict are never
hashed. Running statistics of normalization layers are hashed in evaluations, which use them.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ddpdoctor.probe.observers import steps
from ddpdoctor.probe.observers.ddp_modules import Replicas
from ddpdoctor.probe.observers.readback import (
    Elements,
    Readback,
    capturing,
    hash_of,
    hashable,
    is_plain,
    norms_of,
    when_ready,
)
from ddpdoctor.probe.runtime import sites, torch_groups, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.records.model import BuffersRecord, OtherModelRecord, StatisticsRecord
from ddpdoctor.run.records.training import EvaluationRecord

DENSE_STEPS = 8  # number of first steps, all hashed; then powers of two, each with the next step
MAX_INTERVAL = 1024  # maximum interval of hashed steps, instead of larger powers of two
MAX_BUFFERS = 8  # maximum number of buffers in a record
MAX_EVALUATIONS = 64  # maximum number of evaluations that a rank records
UNBUDGETED_EVALUATIONS = 2  # number of evaluations without budget, which short jobs have spent
MAX_OTHERS = 8  # maximum number of followed models outside DDP
MAX_TRIES = 2  # maximum number of batches of an evaluation at which evaluation mode is checked
MAX_LAYERS = 64  # maximum number of layers whose statistics are hashed
MAX_SAMPLED_LAYERS = 4  # maximum number of layers whose elements are written
SAMPLED_ELEMENTS = 32  # number of elements of a buffer that are written
STATISTICS = ("running_", "moving_")  # prefixes of the names of running statistics


class Buffers(Observer):
    """The buffers of a rank's modules, in training."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._last: dict[int, int] = {}  # by module, the last step that was hashed
        self._cost = 0

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """Hash a module's buffers. All ranks choose the same steps."""
        step = self.state.tracker.steps
        # Two steps in a row show how fast a buffer changes.
        before = step & ~1
        if not armed or (step >= DENSE_STEPS and before & (before - 1) and before % MAX_INTERVAL):
            return
        module = self._replicas.number_of(ddp)
        budget = self.state.budget
        if (
            module is None
            or steps.uneven_inputs
            or self._last.get(module) == step
            or budget.left() <= self._cost
        ):
            return
        broadcasts = torch_private.broadcasts_buffers(ddp)
        if broadcasts is None or (broadcasts and ddp.modules_buffers):
            return
        if capturing(sys.modules["torch"]):
            return
        self._last[module] = step
        start = clock()
        found = dict(_unnormalized(ddp))
        if found:
            record = BuffersRecord(
                step=step,
                module=module,
                armed=self.state.tracker.armed,
                broadcast=broadcasts,
                names=tuple(found),
            )
            _write(self.state, record, list(found.values()), len(found))
        self._cost = clock() - start
        budget.spend(self._cost)


class Evaluations(Observer):
    """Broadcasts of buffers in evaluations through the DDP wrapper."""

    def buffers_begin(self, ddp: Any) -> None:
        """Record the broadcast in the first evaluations."""
        torch: Any = sys.modules["torch"]
        if not torch.is_grad_enabled():
            record = EvaluationRecord(
                time=time.time_ns(),
                armed=self.state.tracker.armed,
                type=type(ddp.module).__name__,
                group=tuple(torch_groups.group_ranks(ddp)),
                buffers=sum(1 for _ in ddp.module.buffers()),
                **sites.caller().place,
            )
            self.state.add(record, MAX_EVALUATIONS)


class Statistics(Observer):
    """Running statistics used in evaluations, if each rank keeps its own.

    They are hashed once per evaluation: at a forward of the DDP module without gradients, or when a
    loader returns a batch without gradients while the model is in evaluation mode.
    """

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._hashed: dict[int, int] = {}
        """By module, the synchronized forwards before the last hashed evaluation."""
        self._tried = (-1, 0)
        """Synchronized forwards before the current evaluation, and its batches so far."""
        self._count = 0

    def evaluation_begins(self, ddp: Any) -> None:
        """Hash the statistics of the module that evaluates."""
        number = self._replicas.number_of(ddp)
        if number is not None:
            self._look(number, ddp)

    def batch_evaluated(self, iterator: Any) -> None:
        """Hash the statistics of all modules, since one may be evaluated without DDP."""
        armed = self.state.tracker.armed
        before, tries = self._tried
        if before != armed:
            tries = 0
        elif tries >= MAX_TRIES:
            return
        self._tried = armed, tries + 1
        for each, ddp in self._replicas.living():
            self._look(each.number, ddp)

    def _look(self, number: int, ddp: Any) -> None:
        armed = self.state.tracker.armed
        if (
            not armed
            or self._hashed.get(number) == armed
            or self._count >= MAX_EVALUATIONS
            or torch_private.broadcasts_buffers(ddp) is not False
            or (self.state.budget.left() < 0 and self._count >= UNBUDGETED_EVALUATIONS)
            or capturing(sys.modules["torch"])
        ):
            return
        with self.state.budget.spending():
            layers = {
                name: (module.running_mean, module.running_var)
                for name, module in ddp.module.named_modules()
                if torch_private.keeps_statistics(module)
                and not module.training
                and module.running_mean is not None
                and hashable(module.running_mean)
                and hashable(module.running_var)
            }
            if layers:
                self._hashed[number] = armed
                self._count += 1
                record = StatisticsRecord(
                    time=time.time_ns(),
                    module=number,
                    group=tuple(torch_groups.group_ranks(ddp)),
                    armed=armed,
                    layers=len(layers),
                    names=tuple(layers)[:MAX_SAMPLED_LAYERS],
                    **sites.caller().place,
                )
                kept = [tensor for pair in list(layers.values())[:MAX_LAYERS] for tensor in pair]
                _write(self.state, record, kept, 2 * MAX_SAMPLED_LAYERS)


class OtherModels(Observer):
    """Models outside DDP that are evaluated, such as an average of the weights."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._known: list[weakref.ref[Any]] = []
        self._last = 0  # synchronized forwards before the last evaluation
        self._count = 0

    def model_evaluates(self, module: Any) -> None:
        """Follow a model from its first ``eval()`` on."""
        if len(self._known) < MAX_OTHERS and all(each() is not module for each in self._known):
            self._known.append(weakref.ref(module))

    def batch_evaluated(self, iterator: Any) -> None:
        """Record norms of the models' parameters as an evaluation begins."""
        armed = self.state.tracker.armed
        if not self._known or self._count >= MAX_EVALUATIONS or armed == self._last:
            return
        self._last = armed
        if not self._replicas.alive:
            return
        self._count += 1
        with self.state.budget.spending():
            inside = self._replicas.parameter_ids()
            for number, reference in enumerate(self._known):
                module = reference()
                if module is None or module.training:
                    continue
                parameters = [each for each in module.parameters() if is_plain(each)]
                if not parameters or any(id(each) in inside for each in parameters):
                    continue
                chosen = parameters[:: max(1, len(parameters) // MAX_SAMPLED_LAYERS)][
                    :MAX_SAMPLED_LAYERS
                ]
                read = norms_of(chosen)
                record = OtherModelRecord(number=number, type=type(module).__name__, armed=armed)
                if read is not None:
                    self.state.recorder.add(when_ready([read], _with_values(record)))


def _with_values(record: OtherModelRecord) -> Callable[[list[Any]], OtherModelRecord]:
    return lambda values: replace(record, values=tuple(values))


def _write(
    state: RankState, record: BuffersRecord | StatisticsRecord, tensors: Sequence[Any], sampled: int
) -> None:
    """Write a record with hashes of tensors, and elements of the first ones."""
    with sys.modules["torch"].no_grad():
        hashes = Readback([hash_of(each) for each in tensors])
        samples = [Elements(each, SAMPLED_ELEMENTS) for each in tensors[:sampled]]

    def made(numbers: list[Any]) -> BuffersRecord | StatisticsRecord:
        texts = tuple(f"{each & (1 << 64) - 1:016x}" for each in numbers[: len(tensors)])
        return replace(record, hashes=texts, samples=tuple(each.packed() for each in samples))

    state.recorder.add(when_ready([hashes, *(each.read for each in samples)], made))


def _unnormalized(ddp: Any) -> Iterator[tuple[str, Any]]:
    """Yield the first buffers of the state dict with their names, without running statistics."""
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", None) or set()
    found = 0
    for prefix, module in ddp.module.named_modules():
        mine = vars(module).get("_buffers")
        if not mine or torch_private.keeps_statistics(module):
            continue
        unsaved = torch_private.unsaved_buffers(module)
        for short, buffer in mine.items():
            name = f"{prefix}.{short}" if prefix else short
            if (
                buffer is not None
                and found < MAX_BUFFERS
                and name not in ignored
                and short not in unsaved
                and not short.startswith(STATISTICS)
                and hashable(buffer)
                and buffer.is_floating_point()
                and buffer.element_size() > 1
                and buffer.numel()
            ):
                found += 1
                yield name, buffer
