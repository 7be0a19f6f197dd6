"""Wrap the training loop and the functions that scripts call around it.

The loop consists of batches, backward passes, and steps of optimizers and GradScaler. Around it are
options, models, samplers, schedulers and files. `WRAPPED` lists functions with an observer that is
called before or after them. Functions that raise warnings by stack level are wrapped further down
the stack, so that the warnings still point to the user's line.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from ddpdoctor.probe.observers import (
    ddp_modules,
    failures,
    job_launch,
    loaders,
    optimizers,
    random_numbers,
    readback,
    sample_contents,
    steps,
)
from ddpdoctor.probe.observers.steps import StepTracker
from ddpdoctor.probe.runtime import debugger, events, hot, rank, shield, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer, emit
from ddpdoctor.probe.runtime.hot import Chain
from ddpdoctor.probe.runtime.sites import site_of
from ddpdoctor.probe.runtime.wrapping import after, around, before
from ddpdoctor.run.status import NO_EPOCH, Phase

_fetches, _backs, _opts = Chain(1), Chain(1), Chain(1)
_light_begins, _light_ended = hot.step_begins, hot.step_ended
_DATA, _BACKWARD, _OPTIMIZER = int(Phase.DATA), int(Phase.BACKWARD), int(Phase.OPTIMIZER)

# -- batches


def install_dataloader(dataloader: ModuleType) -> None:
    """Time the training thread's waits for a batch, and notice loaders and the indices drawn."""
    for iterator_class in torch_private.loader_iterator_classes(dataloader):
        around(
            iterator_class, "_next_data", "dataloader", _batch_wanted, _batch_came, light="batch"
        )
    base = torch_private.loader_iterator_base(dataloader)
    if base is not None:
        around(base, "_next_index", "indices", _indices_wanted, _indices_drawn, light="indices")
        after(dataloader.DataLoader, "__setattr__", _attribute_set)
    for fetcher in torch_private.fetchers(dataloader):
        after(fetcher, "__init__", _fetcher_made)


def _fetcher_made(result: None, fetcher: Any, *args: Any) -> None:
    if random_numbers.worker_begins():
        after(type(fetcher), "fetch", random_numbers.batch_made)


def _batch_wanted(iterator: Any) -> Any:
    tracker = rank.active
    if tracker is None:
        return None
    first = torch_private.is_first_batch(iterator)
    began = clock() if first or tracker.clocked else 0
    if first:
        epoch = getattr(torch_private.sampler_of(iterator), "epoch", None)
        # Some jobs store a seed as the epoch: a number of more than eight bytes is not one.
        known = type(epoch) is int and abs(epoch) < 1 << 63
        iterator._ddpdoctor_epoch = epoch if known else NO_EPOCH
        debugger.note_worker_code(iterator)
        tracker.looped = 0
    if not tracker.enter(_DATA, _fetches.sites()[0]):
        return None
    tracker.fetch(id(iterator), first)
    tracker.epoch = getattr(iterator, "_ddpdoctor_epoch", NO_EPOCH)
    _charge(tracker, began, first)
    return iterator


def _charge(tracker: StepTracker, began: int, of_pass: bool) -> None:
    """Charge the hooks of a loader as part of the measured step, or once per pass."""
    if began:
        if tracker.clocked:
            tracker.spent += clock() - began
        if of_pass:
            tracker.detail.charge(began)


def _batch_came(iterator: Any, data: Any, error: BaseException | None) -> None:
    tracker = rank.active
    if tracker is None:
        return
    ended = isinstance(error, StopIteration)
    of_pass = ended or torch_private.is_first_batch(iterator)
    began = clock() if of_pass or tracker.clocked else 0
    tracker.leave(None if ended else error)
    if error is None:
        if not tracker.light:
            tracker.step.fetched += sample_contents.batch_size(data)
        for subscriber in events.batch_fetched:
            subscriber(iterator, data)
        if not sys.modules["torch"].is_grad_enabled():
            emit(Observer.batch_evaluated, iterator)
        elif not tracker.goes_on(id(iterator)):
            emit(Observer.loop_turns, iterator)
    elif ended:
        tracker.outside()
        emit(Observer.loader_exhausted, iterator)
    _charge(tracker, began, of_pass)


def _indices_wanted(iterator: Any) -> Any:
    return iterator


def _indices_drawn(iterator: Any, index: Any, error: BaseException | None) -> None:
    tracker = rank.active
    began = clock() if tracker is not None and tracker.clocked else 0
    for subscriber in events.indices_drawn if error is None else ():
        subscriber(index, iterator)
    if began and tracker is not None:
        tracker.spent += clock() - began


def _attribute_set(result: None, loader: Any, attr: str, val: Any) -> None:
    if attr == torch_private.LOADER_BUILT:
        loaders.built_loaders.add(loader, site_of(sys._getframe(3)))


def install_distributed_sampler(module: ModuleType) -> None:
    """Notice each ``DistributedSampler`` that is made."""
    _notice_built(module.DistributedSampler, "dataset", loaders.built_samplers)


def install_subset(module: ModuleType) -> None:
    """Notice each ``Subset`` that is made."""
    _notice_built(module.Subset, "indices", loaders.built_subsets)


def _notice_built(made: Any, first: str, book: loaders.Book) -> None:
    """Note objects of a class when their ``__init__`` sets the attribute ``first``.

    Thus none of our frames is on their stack, and the class looks unchanged.
    """
    if "__setattr__" in vars(made):
        return

    def __setattr__(self: Any, attr: str, val: Any) -> None:
        super(made, self).__setattr__(attr, val)
        if attr == first:
            _note_built(book, self)

    made.__setattr__ = __setattr__


@shield.shielded
def _note_built(book: loaders.Book, thing: Any) -> None:
    book.add(thing, site_of(sys._getframe(3)))


# -- backward


def install_backward(autograd: ModuleType) -> None:
    """Wrap the engine's call in ``torch.autograd.backward``."""
    name = torch_private.ENGINE
    around(autograd, name, "backward", _backward_begins, _backward_ended, light="engine")


def _backward_begins(tensors: Any, *args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
    tracker = rank.active
    # autograd.grad calls the engine without accumulating: that is not a backward pass. Reentrant
    # checkpointing calls backward within backward: that is one phase and counts once.
    if not accumulate_grad or tracker is None or tracker.phase == _BACKWARD:
        return None
    began = clock() if tracker.clocked else 0
    loss = None
    if not tracker.light and len(tensors) == 1 and tensors[0].numel() == 1:
        loss = readback.loss_reader(unscaled(tensors[0]))
    for subscriber in events.graph_begins if tensors else ():
        subscriber(unscaled(tensors[0]))
    site = _backs.sites()[0]
    if not tracker.enter(_BACKWARD, site):
        return None
    reduced = tracker.reduced
    tracker.backward_begins(site)
    if tracker.reduced != reduced and torch_private.is_bare(tensors):
        _look_at_graph(tensors)
    if loss is not None:
        tracker.step.loss = loss
        # Only a finite number minus itself is 0.
        if callable(loss) or loss - loss != 0.0:
            emit(Observer.loss_began, tensors[0], loss)
    for subscriber in events.backward_begins:
        subscriber()
    if began:
        tracker.spent += clock() - began
    return tracker


@shield.shielded
def _look_at_graph(tensors: Any) -> None:
    if torch_private.reaches_no_parameter(tensors):
        emit(Observer.constant_backward)


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
    # Without the hook we assume that every job has an optimizer.
    optimizers.any_made = not hasattr(module.Optimizer, torch_private.PATCH_STEP)
    before(module.Optimizer, torch_private.PATCH_STEP, optimizers.made)
    after(module.Optimizer, "load_state_dict", _optimizer_loaded)


_initializing = 0
"""Number of running calls of torch that step an optimizer only to create its state."""


def install_state_dict(module: ModuleType) -> None:
    """Ignore optimizer steps of ``get_state_dict`` and others, which only create state."""
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


# Dynamo traces these two when it compiles the step of an optimizer. It takes `is_tracing` as true.


def _step_begins(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not rank.is_tracing() and not _light_begins(optimizer):
        _begin_step(optimizer, sys._getframe(1))


def _step_ended(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not rank.is_tracing() and not _light_ended(optimizer):
        _end_step(optimizer)


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


def _end_step(optimizer: Any) -> None:
    tracker = rank.active
    if tracker is None or tracker.phase != _OPTIMIZER:
        return
    began = clock() if tracker.clocked else 0
    light = tracker.light
    try:
        tracker.leave()
        # A step of a subclass that calls its parent's step counts once.
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
    emit(Observer.optimizer_loaded, optimizer)


# -- GradScaler: steps that it skips count, and the recorded loss is the one before scaling

_last_scaled: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None


def install_scaler(module: ModuleType) -> None:
    """Wrap ``torch.amp.GradScaler``. The class in ``torch.cuda.amp`` inherits from it."""
    after(module.GradScaler, "scale", _note_scaled)
    before(module.GradScaler, "unscale_", _unscales)
    around(module.GradScaler, "step", "amp", _scaler_steps, _scaler_stepped)


def unscaled(loss: Any) -> Any:
    """Return the tensor that was scaled into ``loss``, or ``loss`` itself."""
    if _last_scaled is not None and _last_scaled[0]() is loss:
        original = _last_scaled[1]()
        if original is not None:
            return original
    return loss


def _note_scaled(result: Any, scaler: Any, outputs: Any) -> None:
    global _last_scaled
    try:
        if rank.active is not None and result is not outputs:
            _last_scaled = weakref.ref(result), weakref.ref(outputs)
            for subscriber in events.loss_scaled:
                subscriber()
    except TypeError:
        _last_scaled = None


def _unscales(scaler: Any, optimizer: Any) -> None:
    emit(Observer.unscales)


def _scaler_steps(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    tracker = rank.active
    if steps.current_scaler() is not scaler:
        steps.last_scaler = weakref.ref(scaler)
    return None if tracker is None else (tracker, optimizer, tracker.optimizer_steps)


def _scaler_stepped(begun: Any, result: Any, error: BaseException | None) -> None:
    tracker, optimizer, steps_before = begun
    if error is None and tracker.optimizer_steps == steps_before:
        tracker.stepped(optimizer, skipped=True)


# -- functions that scripts call around the loop

CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


def _weights_loaded(result: Any, module: Any, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    ddp_modules.state_dict_loaded(module, state_dict, result)
    emit(Observer.weights_loaded, module)


def _model_given(process_group: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
    # The two frames between belong to the shield and to the wrapper.
    ddp = sys._getframe(3).f_locals.get("self")
    emit(Observer.model_given, ddp, process_group, tensors)


def _stage_built(result: None, stage: Any, *args: Any, **kwargs: Any) -> None:
    emit(Observer.stage_built, stage)


def _scheduler_made(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    emit(Observer.scheduler_made, scheduler)


def _model_evaluates(result: Any, module: Any) -> None:
    emit(Observer.model_evaluates, module)


def _rate_cut(*args: Any, **kwargs: Any) -> None:
    emit(Observer.rate_cut)


def _saves(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    emit(Observer.saves, obj, f)


Wrap = Callable[[Any, str, Callable[..., object]], None]

WRAPPED: tuple[tuple[str, str, str, Wrap, Callable[..., object]], ...] = (
    # `parse_args` calls it, too.
    ("argparse", "ArgumentParser", "parse_known_args", after, job_launch.arguments_parsed),
    ("argparse", "_ActionsContainer", "add_argument", before, job_launch.argument_added),
    ("torch.nn.parallel.data_parallel", "DataParallel", "__init__", before,
     job_launch.data_parallel_built),
    # DDP's own ``join`` returns one.
    ("torch.distributed.algorithms.join", "Join", "__enter__", before, steps.join_entered),
    # It issues no warnings by stack level.
    ("torch.nn.modules.module", "Module", "load_state_dict", after, _weights_loaded),
    ("torch.nn.modules.module", "Module", "eval", after, _model_evaluates),
    # The comparison of shapes that comes first in DDP's constructor.
    ("torch.nn.parallel.distributed", "", torch_private.VERIFY_PARAMETERS, before, _model_given),
    ("torch.distributed.pipelining.stage", torch_private.STAGE, "__init__", after, _stage_built),
    ("torch.optim.lr_scheduler", "LRScheduler", "__init__", after, _scheduler_made),
    # Its constructor does not call the base class's.
    ("torch.optim.lr_scheduler", "ReduceLROnPlateau", "__init__", after, _scheduler_made),
    ("torch.optim.lr_scheduler", "ReduceLROnPlateau", torch_private.REDUCE_LR, after, _rate_cut),
    # Before ``torch`` copies the name.
    ("torch.serialization", "", "save", before, _saves),
)  # fmt: skip
"""Module, class (empty for the module itself), function, how it is wrapped, and the observer."""


def install_wrapped(module: ModuleType) -> None:
    """Wrap the functions of a module that `WRAPPED` lists."""
    for name, owner, function, wrap, observer in WRAPPED:
        if name == module.__name__:
            wrap(getattr(module, owner, None) if owner else module, function, observer)


def install_clipping(module: ModuleType) -> None:
    """Wrap functions that clip gradients, before ``torch.nn.utils`` copies their names."""
    for name in CLIPPING:

        def begins(*args: Any, clipping: str = name, **kwargs: Any) -> Any:
            emit(Observer.clips, clipping, sys._getframe(2))
            return rank.active

        around(module, name, "clipping", begins, _clipped, compiled=True)


def _clipped(tracker: Any, result: Any, error: BaseException | None) -> None:
    """Keep the norm that was returned."""
    if tracker.light:
        return
    # A tensor of another class may be spread over ranks. Reading it would be a collective.
    if type(result) is sys.modules["torch"].Tensor and result.numel() == 1:
        tracker.step.norm = readback.loss_reader(result)


def install_serialization(serialization: ModuleType) -> None:
    """Record loaded storages' devices. Wrap below ``torch.load``: its warnings name its caller."""
    original = getattr(serialization, torch_private.RESTORE_LOCATION, None)
    if original is None:
        return

    @functools.wraps(original)
    def _get_restore_location(map_location: Any) -> Any:
        restore = original(map_location)
        mapped = map_location is not None
        seen: set[Any] = set()

        @shield.shielded
        def look(device: Any) -> None:
            if device.type == "cuda" and device not in seen:
                seen.add(device)
                failures.tensors_loaded(device, mapped)

        def restore_location(storage: Any, location: Any) -> Any:
            result = restore(storage, location)
            look(getattr(result, "device", None))
            return result

        return restore_location

    setattr(serialization, torch_private.RESTORE_LOCATION, _get_restore_location)
