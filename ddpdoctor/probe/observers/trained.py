"""Record what each step trains with: rates, samples, losses, norms, averages of the weights.

This is off unless the command asks for it. It may wait for a GPU: a rank that is compared with
another number of ranks need not be fast.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import sys
import weakref
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple
from zlib import crc32

from ddpdoctor.probe.observers import readback, schedules
from ddpdoctor.probe.runtime import rank, torch_memory, torch_private
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.shield import shielded
from ddpdoctor.probe.runtime.sites import NOWHERE, Site, caller
from ddpdoctor.run import overrides
from ddpdoctor.run.capsule import row_sizes, tensors_of
from ddpdoctor.run.records.process import OverrideRecord
from ddpdoctor.run.records.training import CourseRecord, TrainedModelRecord, TrainedRecord

MAX_TRAINED = 4096  # steps that are recorded
SEARCHED = (2, 6, 12)  # steps at which averages of the weights are searched for
MAX_ELEMENTS = 1 << 16  # of a parameter whose averages are followed
MAX_ALIKE = 4096  # tensors of its shape that are compared with it
MAX_DISTANCE = 0.5  # distance of an average to the parameter, in lengths of that
MAX_CANDIDATES = 8  # tensors that may be its average
MIN_DECAY = 0.3  # least decay of an average
MAX_REST = 0.3  # part of a tensor's change that a decay leaves unexplained
MAX_OTHERS = 64  # steps of other optimizers after which one is not waited for any longer
CLIPS = frozenset(("clamp", "clamp_", "clip", "clip_", "clamp_max", "clamp_min", "hardtanh"))
"""Functions that bound elements of a tensor."""


class _Taken(NamedTuple):
    """A parameter and tensors that may be its average, before a step."""

    parameter: Any
    others: dict[int, Any]


class _Averages:
    """Tensors that follow a parameter as an exponential average does.

    No class or function tells: an average is a tensor that moves towards the parameter by the same
    part in all its elements.
    """

    def __init__(self) -> None:
        self._parameter: weakref.ref[Any] | None = None
        self._candidates: list[weakref.ref[Any]] = []
        self._before: _Taken | None = None
        self._steps = 0

    def measure(self, ddp: Any, optimizer: Any) -> float | None:
        """Return the decay since the step before. None if nothing averages the weights."""
        self._steps += 1
        if self._steps in SEARCHED and not self._candidates:
            self._search(ddp, optimizer)
        parameter = self._parameter() if self._parameter is not None else None
        if parameter is None or not self._candidates:
            return None
        living = [each() for each in self._candidates]
        now = _Taken(_numbers(parameter), {id(e): _numbers(e) for e in living if e is not None})
        before, self._before = self._before, now
        if before is None:
            return None
        found = [
            _decay(before.others[name], other, now.parameter)
            for name, other in now.others.items()
            if name in before.others
        ]
        moved = [each for each in found if each is not None and each < 1.0]
        return min(moved) if moved else 1.0 if 1.0 in found else None

    def _search(self, ddp: Any, optimizer: Any) -> None:
        """Look for tensors of the shape of the largest parameter that is not too large."""
        mine = [
            each
            for each in ddp.module.parameters()
            if each.requires_grad and readback.is_plain(each) and each.numel() <= MAX_ELEMENTS
        ]
        if not mine:
            return
        parameter = max(mine, key=lambda each: each.numel())
        known = {id(each) for each in (*ddp.module.parameters(), *ddp.module.buffers())}
        known.update(id(each) for each in optimizer.state.get(parameter, {}).values())
        torch = sys.modules["torch"]
        kinds = (torch.Tensor, torch.nn.Parameter)
        self._parameter = weakref.ref(parameter)
        alike = (
            each
            for each in gc.get_objects()
            if type(each) in kinds
            and each.shape == parameter.shape
            and id(each) not in known
            and each.grad_fn is None
            and readback.is_plain(each)
            and each.data_ptr() != parameter.data_ptr()
        )
        now = _numbers(parameter)
        near = float(now.norm()) * MAX_DISTANCE
        for each in itertools.islice(alike, MAX_ALIKE):
            if float((_numbers(each) - now).norm()) < near:
                self._candidates.append(weakref.ref(each))
        del self._candidates[MAX_CANDIDATES:]


def _numbers(tensor: Any) -> Any:
    return tensor.detach().double().cpu().flatten().clone()


def _decay(before: Any, after: Any, parameter: Any) -> float | None:
    """Return the decay with which a tensor moved towards a parameter. None if it did not."""
    change, apart = after - before, before - parameter
    length = float(apart @ apart)
    if length == 0.0 or not math.isfinite(length):
        return None
    if not bool(change.any()):
        return 1.0
    decay = 1.0 + float(change @ apart) / length
    rest = float((change - (decay - 1.0) * apart).norm() / change.norm())
    return decay if rest < MAX_REST and MIN_DECAY < decay < 1.0 else None


class Trained(Observer):
    """What each step trains with."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._samples = self._forwards = 0
        self._losses: list[Any] = []
        self._factors: list[float | None] = []
        self._rows: list[Any] = []
        self._pulls: list[Any] = []
        self._rates: tuple[float, ...] = ()
        self._decays: tuple[float, ...] = ()
        self._ddp: weakref.ref[Any] | None = None
        self._main: weakref.ref[Any] | None = None  # The optimizer whose steps are recorded
        self._others = 0  # Steps of other optimizers since its last one
        self._made: list[tuple[weakref.ref[Any], Site]] = []
        self._scheduler: Any = None
        self._new = False  # a scheduler was made, and its schedule is not known yet
        self._begun = False  # the model was recorded
        self._averages = _Averages()
        self._clipped = False
        self._masks: list[int] = []
        self._measured: tuple[float | None, float | None, float | None, float | None] | None = None
        for name in (overrides.SEED, overrides.WEIGHTS):
            value = _overridden().get(name)
            if value is not None:
                state.add(OverrideRecord(owner=name, name=name, value=str(value)), 2)

    def ddp_built(self, ddp: Any) -> None:
        """Follow its forwards. Hooks on its module would be pickled with that."""
        ddp.register_forward_hook(self._forwarded, with_kwargs=True)
        if self._ddp is None:
            self._ddp = weakref.ref(ddp)

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """Read the random number generator before the first forward of a step."""
        if not self._forwards:
            self._masks = [_generator(ddp)]

    def _forwarded(self, ddp: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._count(ddp, args, kwargs, output)

    @shielded
    def _count(self, ddp: Any, args: Any, kwargs: Any, output: Any) -> None:
        torch = sys.modules["torch"]
        if rank.current() is not self.state or not torch.is_grad_enabled():
            return
        first = next((each for each in tensors_of((args, kwargs), torch) if each.dim()), None)
        self._samples += int(first.shape[0]) if first is not None else 0
        self._forwards += 1
        if len(self._masks) == 1:
            self._masks.append(_generator(ddp))
        shown = [each for each in tensors_of(output, torch) if each.requires_grad and each.dim()]
        if shown:
            max(shown, key=lambda each: each.numel()).register_hook(self._pulled)

    def _pulled(self, gradient: Any) -> None:
        self._measure(gradient.detach())

    @shielded
    def _measure(self, gradient: Any) -> None:
        sizes = row_sizes(gradient)
        self._rows.append((sizes > 0).sum())
        self._pulls.append(sizes.double().sum())

    def graph_begins(self, loss: Any) -> None:
        """Keep the loss of a backward."""
        if loss.numel() == 1:
            self._losses.append(loss.detach())
            self._factors.append(torch_private.factor_of(loss))

    def scheduler_made(self, scheduler: Any) -> None:
        """Note a scheduler. Its schedule may not be complete yet."""
        self._made.append((weakref.ref(scheduler), caller()))
        self._new = True

    def clips(self, name: str, frame: FrameType) -> None:
        """Expect a norm."""
        self._clipped = True

    def step_begins(self, optimizer: Any) -> None:
        """Read what the parameters are about to change with."""
        if not self._is_main(optimizer):
            return
        for group in optimizer.param_groups:
            self._rates += (float(group.get("lr", 0.0)),)
            self._decays += (float(group.get("weight_decay", 0.0)),)
        ddp = self._ddp() if self._ddp is not None else None
        if ddp is None or self._measured is not None:
            return
        if not self._begun:
            self._begun = True
            self._record_model(ddp)
        if self._new:
            self._new = False
            self._record_course(optimizer)
        parameters = list(ddp.module.parameters())
        used = _norm(each.grad for each in parameters if each.grad is not None)
        # After that, a GPU has copied the norm that clipping returned, too.
        norm = self.state.tracker.step.norm if self._clipped else None
        self._measured = (
            norm() if callable(norm) else norm,
            used,
            self._averages.measure(ddp, optimizer),
            _norm(
                each.running_var
                for each in ddp.module.modules()
                if torch_private.keeps_statistics(each) and each.running_var is not None
            ),
        )

    def _is_main(self, optimizer: Any) -> bool:
        """Return whether a step of this optimizer ends a step of the training.

        It is the first one that makes a step, unless it makes none any more.
        """
        main = self._main() if self._main is not None else None
        self._others = 0 if main is optimizer else self._others + 1
        if main is None or self._others > MAX_OTHERS:
            self._main, self._new, self._others = weakref.ref(optimizer), True, 0
            return True
        return main is optimizer

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Record the step."""
        if self._main is not None and self._main() is not optimizer:
            return
        norm, used, average, spread = self._measured or (None, None, None, None)
        scheduler = self._scheduler() if self._scheduler is not None else None
        record = TrainedRecord(
            step=number,
            rates=self._rates,
            decays=self._decays,
            samples=self._samples,
            forwards=self._forwards,
            loss=self._loss(),
            rows=sum(int(each) for each in self._rows) if self._rows else None,
            pull=sum(float(each) for each in self._pulls) if self._pulls else None,
            armed=self.state.tracker.armed,
            position=None if scheduler is None else schedules.position_of(scheduler),
            norm=norm,
            used=used,
            average=average,
            masks=(self._masks[0], self._masks[1]) if len(self._masks) == 2 else None,
            spread=spread,
        )
        self.state.add(record, MAX_TRAINED)
        self._samples = self._forwards = 0
        self._rates = self._decays = ()
        self._clipped, self._measured, self._masks = False, None, []
        for each in (self._losses, self._factors, self._rows, self._pulls):
            each.clear()

    def _loss(self) -> float | None:
        """Return the mean loss of the backwards, before the job divided it by their number."""
        number = len(self._losses)
        if not number:
            return None
        divided = all(each and math.isclose(each * number, 1.0) for each in self._factors)
        return sum(map(float, self._losses)) / (1 if divided else number)

    def _record_model(self, ddp: Any) -> None:
        layers = [each for each in ddp.module.modules() if torch_private.is_batch_norm(each)]
        codes = [code for each in ddp.module.parameters() for code in _clipping_hooks(each)]
        site = Site(codes[0].co_filename, codes[0].co_firstlineno) if codes else NOWHERE
        self.state.recorder.add(
            TrainedModelRecord(
                weights=_norm(ddp.module.parameters()) or 0.0,
                batchnorm=len(layers),
                synchronized=sum(not torch_private.normalizes_alone(each) for each in layers),
                hooks=len(codes),
                **site.place,
            )
        )

    def _record_course(self, optimizer: Any) -> None:
        """Record the schedule of an optimizer's only scheduler."""
        known = [
            (scheduler, site)
            for each, site in self._made
            if getattr(scheduler := each(), "optimizer", None) is optimizer
        ]
        found = schedules.outermost([scheduler for scheduler, _ in known])
        course = None
        # Schedulers of the job's own may refuse to be copied.
        with contextlib.suppress(Exception):
            # Of several, it is not known which is stepped when.
            course = schedules.course_of(found[0]) if len(found) == 1 else None
        self._scheduler = weakref.ref(found[0]) if course is not None else None
        if course is not None:
            self.state.recorder.add(
                CourseRecord(
                    scheduler=type(found[0]).__name__, **course._asdict(), **known[-1][1].place
                )
            )


class KeptWeights(Observer):
    """Undo what optimizers and training forwards change, so that all evaluations have one model."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._first: dict[int, tuple[Any, Any]] = {}  # A tensor and a copy, by the tensor's id

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """Keep the tensors of a module before its first training forward."""
        self._keep(itertools.chain(ddp.module.parameters(), ddp.module.buffers()))

    def step_begins(self, optimizer: Any) -> None:
        """Keep parameters that belong to no DDP module."""
        self._keep(each for group in optimizer.param_groups for each in group["params"])

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Undo the step."""
        self._restore()

    def model_evaluates(self, module: Any) -> None:
        """Undo what forwards without a step behind them changed in buffers."""
        self._restore()

    def _keep(self, tensors: Iterable[Any]) -> None:
        for each in tensors:
            if id(each) not in self._first:
                self._first[id(each)] = each, each.detach().clone()

    def _restore(self) -> None:
        for tensor, first in self._first.values():
            # A backward may be between: autograd does not have to notice.
            tensor.data.copy_(first)


def _overridden() -> dict[str, overrides.Value]:
    return overrides.parse(os.environ.get(overrides.VARIABLE, ""))


def keeps_weights() -> bool:
    """Return whether the weights of this job have to stay as they are."""
    return overrides.WEIGHTS in _overridden()


def _norm(tensors: Iterable[Any]) -> float | None:
    """Return the norm of all plain tensors together. None if there are others, or none."""
    square, number = 0.0, 0
    for each in tensors:
        if not readback.is_plain(each):
            return None
        square += float(each.detach().double().norm()) ** 2
        number += 1
    return math.sqrt(square) if number else None


def _generator(ddp: Any) -> int:
    """Return a hash of the state of the generator that draws on a module's device."""
    torch = sys.modules["torch"]
    device = next((each.device for each in ddp.module.parameters() if each.is_cuda), None)
    state = torch.get_rng_state() if device is None else torch.cuda.get_rng_state(device)
    return crc32(bytes(state.tolist()))


def _clipping_hooks(parameter: Any) -> list[CodeType]:
    """Return the code of the hooks that bound the elements of a parameter's gradient."""
    found = []
    for name, hooks in torch_memory.hooks_of(parameter):
        if name != "_backward_hooks":
            continue
        for hook in list(hooks.values()):
            code = getattr(hook, "__code__", None)
            if code is not None and not CLIPS.isdisjoint(code.co_names):
                found.append(code)
    return found
