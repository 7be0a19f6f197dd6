"""The loop of training: batches, backward passes, steps of optimizers, GradScaler.

What raises warnings by stack level is wrapped below, so that these still blame the user's line.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType, ModuleType
from typing import Any

from ddpdoctor.probe.observers import contents, modes, optimizers, readback
from ddpdoctor.probe.runtime import (
    events,
    hot,
    rank,
    shield,
    torch_loaders,
    torch_private,
    worker_code,
)
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.hot import Chain
from ddpdoctor.probe.runtime.wrapping import after, around, before
from ddpdoctor.run.status import NO_EPOCH, Phase

_fetches, _backs, _opts = Chain(1), Chain(1), Chain(1)
_light_begins, _light_ended = hot.step_begins, hot.step_ended
_DATA, _BACKWARD, _OPTIMIZER = int(Phase.DATA), int(Phase.BACKWARD), int(Phase.OPTIMIZER)


# -- batches


def install_loader(dataloader: ModuleType) -> None:
    """Time the training thread's waits for a batch."""
    for iterator_class in torch_loaders.loader_iterator_classes(dataloader):
        around(iterator_class, "_next_data", "dataloader", _batch_wanted, _batch_came)


def _batch_wanted(iterator: Any) -> Any:
    tracker = rank.active
    if tracker is None:
        return None
    first = torch_loaders.is_first_batch(iterator)
    if first:
        epoch = getattr(torch_loaders.sampler_of(iterator), "epoch", None)
        # Some seed with it: what has no place in eight bytes is no number of an epoch.
        known = type(epoch) is int and abs(epoch) < 1 << 63
        iterator._ddpdoctor_epoch = epoch if known else NO_EPOCH
        worker_code.note(iterator)
    if not tracker.enter(_DATA, _fetches.sites()[0]):
        return None
    tracker.fetch(id(iterator), first)
    tracker.epoch = getattr(iterator, "_ddpdoctor_epoch", NO_EPOCH)
    return iterator


def _batch_came(iterator: Any, data: Any, error: BaseException | None) -> None:
    tracker = rank.active
    if tracker is None:
        return
    ended = isinstance(error, StopIteration)
    tracker.leave(None if ended else error)
    if error is None:
        if not tracker.light:
            tracker.step.fetched += contents.batch_size(data)
        for subscriber in events.batch_fetched:
            subscriber(iterator, data)
    elif ended:
        tracker.outside()
        for each in events.loader_exhausted:
            each(iterator)


# -- backward


def install_backward(autograd: ModuleType) -> None:
    """Wrap the engine's call in ``torch.autograd.backward``."""
    around(
        autograd,
        torch_private.ENGINE,
        "backward",
        _backward_begins,
        _backward_ended,
        backward=True,
    )


def _backward_begins(tensors: Any, *args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
    tracker = rank.active
    # autograd.grad calls the engine as well, without accumulating: no backward pass. Reentrant
    # checkpointing calls backward within backward: one phase, one count.
    if not accumulate_grad or tracker is None or tracker.phase == _BACKWARD:
        return None
    began = clock() if tracker.clocked else 0
    loss = None
    if not tracker.light and len(tensors) == 1 and tensors[0].numel() == 1:
        loss = readback.loss_reader(unscaled(tensors[0]))
    site = _backs.sites()[0]
    if not tracker.enter(_BACKWARD, site):
        return None
    tracker.backward_begins(site)
    if loss is not None:
        tracker.step.loss = loss
        # What is finite is nothing, less itself.
        if callable(loss) or loss - loss != 0.0:
            for each in events.loss_began:
                each(tensors[0], loss)
    for subscriber in events.backward_begins:
        subscriber()
    if began:
        tracker.spent += clock() - began
    return tracker


def _backward_ended(tracker: Any, result: Any, error: BaseException | None) -> None:
    began = clock() if tracker.clocked else 0
    tracker.leave(error)
    tracker.backward_ended()
    if error is None:
        for subscriber in events.backward_ended:
            subscriber()
    if began:
        tracker.spent += clock() - began


# -- optimizers


def install_optimizer(module: ModuleType) -> None:
    """Register torch's public global step hooks (2.0 on), and notice optimizers that are made."""
    module.register_optimizer_step_pre_hook(_step_begins)
    module.register_optimizer_step_post_hook(_step_ended)
    # Without it every job is taken to have an optimizer.
    optimizers.any_made = not hasattr(module.Optimizer, torch_private.PATCH_STEP)
    before(module.Optimizer, torch_private.PATCH_STEP, optimizers.made)
    after(module.Optimizer, "load_state_dict", _optimizer_loaded)


_initializing = 0
"""How many calls of torch's own are under way that step an optimizer to have its state made."""


def install_state_dict(module: ModuleType) -> None:
    """``get_state_dict`` and its kin step an optimizer that has no state yet, without training."""
    around(module, torch_private.INIT_OPTIMIZER, "optimizer", _initializes, _initialized)


def _initializes(*args: Any, **kwargs: Any) -> bool:
    global _initializing
    _initializing += 1
    hot.initializes(1)
    return True


def _initialized(begun: bool, result: Any, error: BaseException | None) -> None:
    global _initializing
    _initializing -= 1
    hot.initializes(-1)


# Dynamo may come here, with the step of an optimizer that it compiles: it knows `is_tracing`.


def _step_begins(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not rank.is_tracing() and not _light_begins(optimizer):
        _begin_step(optimizer, sys._getframe(1))


def _begin_step(optimizer: Any, frame: FrameType) -> None:
    tracker = rank.active
    if tracker is None or _initializing or "optimizer" in shield.off:
        return
    began = clock() if tracker.clocked else 0
    try:
        if tracker.enter(_OPTIMIZER, _opts.sites()[0]):
            tracker.optimizer_code = frame.f_code
        for subscriber in events.step_begins:
            subscriber(optimizer)
    except Exception as error:
        shield.fault("optimizer", error)
    if began:
        tracker.spent += clock() - began


def _step_ended(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not rank.is_tracing() and not _light_ended(optimizer):
        _end_step(optimizer)


def _end_step(optimizer: Any) -> None:
    tracker = rank.active
    if tracker is None or tracker.phase != _OPTIMIZER:
        return
    began = clock() if tracker.clocked else 0
    light = tracker.light
    try:
        tracker.leave()
        # A subclass whose step calls its parent's is still one step.
        if tracker.phase != _OPTIMIZER:
            number = tracker.steps
            tracker.stepped(optimizer)
            for subscriber in events.step_ended:
                subscriber(optimizer, number)
    except Exception as error:
        shield.fault("optimizer", error)
    if began:
        tracker.spent += clock() - began
        tracker.detail.clock(light != 0)


def _optimizer_loaded(result: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    for subscriber in events.optimizer_loaded:
        subscriber(optimizer)


# -- GradScaler: steps that it skips still count, and the loss is the one before scaling

_scaled: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None


def install_scaler(module: ModuleType) -> None:
    """Wrap ``torch.amp.GradScaler``; that of ``torch.cuda.amp`` inherits from it."""
    after(module.GradScaler, "scale", _note_scaled)
    around(module.GradScaler, "step", "amp", _scaler_steps, _scaler_stepped)


def unscaled(loss: Any) -> Any:
    """The tensor that was scaled into ``loss``, or ``loss`` itself."""
    if _scaled is not None and _scaled[0]() is loss:
        original = _scaled[1]()
        if original is not None:
            return original
    return loss


def _note_scaled(result: Any, scaler: Any, outputs: Any) -> None:
    global _scaled
    try:
        if rank.active is not None and result is not outputs:
            _scaled = weakref.ref(result), weakref.ref(outputs)
    except TypeError:
        _scaled = None


def _scaler_steps(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    tracker = rank.active
    if modes.scaler() is not scaler:
        modes.last_scaler = weakref.ref(scaler)
    return None if tracker is None else (tracker, optimizer, tracker.optimizer_steps)


def _scaler_stepped(begun: Any, result: Any, error: BaseException | None) -> None:
    tracker, optimizer, before_it = begun
    if error is None and tracker.optimizer_steps == before_it:
        tracker.stepped(optimizer, skipped=True)
