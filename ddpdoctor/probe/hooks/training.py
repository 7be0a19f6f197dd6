"""Wrap the loop of training, and what scripts call around it.

The loop is batches, backward passes, steps of optimizers and GradScaler. Around it are options,
models, samplers, schedulers and files: each a row that says what is wrapped, and who hears of it
before or after the call. What raises warnings by stack level is wrapped below, so that these still
blame the user's line.
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
    readback,
    sample_contents,
    steps,
)
from ddpdoctor.probe.runtime import debugger, events, hot, rank, shield, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.hot import Chain
from ddpdoctor.probe.runtime.sites import site_of
from ddpdoctor.probe.runtime.wrapping import after, around, before
from ddpdoctor.run.status import NO_EPOCH, Phase

# -- the loop of training: batches, backward passes, steps of optimizers, GradScaler


_fetches, _backs, _opts = Chain(1), Chain(1), Chain(1)
_light_begins, _light_ended = hot.step_begins, hot.step_ended
_DATA, _BACKWARD, _OPTIMIZER = int(Phase.DATA), int(Phase.BACKWARD), int(Phase.OPTIMIZER)


# -- batches


def install_batches(dataloader: ModuleType) -> None:
    """Time the training thread's waits for a batch."""
    for iterator_class in torch_private.loader_iterator_classes(dataloader):
        around(iterator_class, "_next_data", "dataloader", _batch_wanted, _batch_came)


def _batch_wanted(iterator: Any) -> Any:
    tracker = rank.active
    if tracker is None:
        return None
    first = torch_private.is_first_batch(iterator)
    if first:
        epoch = getattr(torch_private.sampler_of(iterator), "epoch", None)
        # Some seed with it: what has no place in eight bytes is no number of an epoch.
        known = type(epoch) is int and abs(epoch) < 1 << 63
        iterator._ddpdoctor_epoch = epoch if known else NO_EPOCH
        debugger.note_worker_code(iterator)
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
            tracker.step.fetched += sample_contents.batch_size(data)
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

_last_scaled: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None


def install_scaler(module: ModuleType) -> None:
    """Wrap ``torch.amp.GradScaler``; that of ``torch.cuda.amp`` inherits from it."""
    after(module.GradScaler, "scale", _note_scaled)
    around(module.GradScaler, "step", "amp", _scaler_steps, _scaler_stepped)


def unscaled(loss: Any) -> Any:
    """The tensor that was scaled into ``loss``, or ``loss`` itself."""
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
    except TypeError:
        _last_scaled = None


def _scaler_steps(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    tracker = rank.active
    if steps.current_scaler() is not scaler:
        steps.last_scaler = weakref.ref(scaler)
    return None if tracker is None else (tracker, optimizer, tracker.optimizer_steps)


def _scaler_stepped(begun: Any, result: Any, error: BaseException | None) -> None:
    tracker, optimizer, before_it = begun
    if error is None and tracker.optimizer_steps == before_it:
        tracker.stepped(optimizer, skipped=True)


# -- setup


CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


def install_argparse(argparse: ModuleType) -> None:
    """``parse_known_args`` is what ``parse_args`` calls, too."""
    before(argparse._ActionsContainer, "add_argument", job_launch.argument_added)
    after(argparse.ArgumentParser, "parse_known_args", job_launch.arguments_parsed)


def install_data_parallel(module: ModuleType) -> None:
    """``torch.nn.DataParallel`` is built."""
    before(module.DataParallel, "__init__", job_launch.data_parallel_built)


def install_join(module: ModuleType) -> None:
    """``torch.distributed.algorithms.join.Join``, which DDP's own ``join`` returns."""
    before(module.Join, "__enter__", steps.join_entered)


def install_module(module: ModuleType) -> None:
    """Weights are loaded into a module; that raises and warns nothing by stack level."""
    after(module.Module, "load_state_dict", _weights_loaded)


def _weights_loaded(result: Any, module: Any, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    ddp_modules.state_dict_loaded(module, state_dict, result)
    for subscriber in events.weights_loaded:
        subscriber(module)


def install_verification(module: ModuleType) -> None:
    """The comparison of shapes that comes first in DDP's constructor."""
    before(module, torch_private.VERIFY_PARAMETERS, _model_given)


def _model_given(process_group: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
    # Above us are what shields this and what wraps the comparison.
    ddp = sys._getframe(3).f_locals.get("self")
    for subscriber in events.model_given:
        subscriber(ddp, process_group, tensors)


def install_stages(module: ModuleType) -> None:
    """Each stage of a pipeline that is built."""
    after(getattr(module, torch_private.STAGE, None), "__init__", _stage_built)


def _stage_built(result: None, stage: Any, *args: Any, **kwargs: Any) -> None:
    for subscriber in events.stage_built:
        subscriber(stage)


def install_clipping(module: ModuleType) -> None:
    """Functions that clip gradients, before ``torch.nn.utils`` copies their names."""
    for name in CLIPPING:
        around(module, name, "clipping", _clips(name), _clipped, compiled=True)


def _clips(name: str) -> Callable[..., Any]:
    def clips(*args: Any, **kwargs: Any) -> Any:
        for subscriber in events.clips:
            subscriber(name, sys._getframe(2))
        return rank.active

    return clips


def _clipped(tracker: Any, result: Any, error: BaseException | None) -> None:
    """Keep the norm that came back."""
    if tracker.light:
        return
    # A tensor of another class may be spread over ranks: to read it would be a collective.
    if type(result) is sys.modules["torch"].Tensor and result.numel() == 1:
        tracker.step.norm = readback.loss_reader(result)


def install_schedulers(module: ModuleType) -> None:
    """Schedulers are built; the constructor of ``ReduceLROnPlateau`` does not call its base's."""
    for name in ("LRScheduler", "ReduceLROnPlateau"):
        after(getattr(module, name, None), "__init__", _scheduler_made)
    after(getattr(module, "ReduceLROnPlateau", None), torch_private.REDUCE_LR, _rate_cut)


def _scheduler_made(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    for subscriber in events.scheduler_made:
        subscriber(scheduler)


def _rate_cut(*args: Any, **kwargs: Any) -> None:
    for subscriber in events.rate_cut:
        subscriber()


def install_serialization(serialization: ModuleType) -> None:
    """``torch.save``, before ``torch`` copies the name, and where loaded storages go.

    That is below ``torch.load``, whose warnings blame its caller.
    """
    before(serialization, "save", _saves)
    original = getattr(serialization, torch_private.RESTORE_LOCATION, None)
    if original is None:
        return

    @functools.wraps(original)
    def _get_restore_location(map_location: Any) -> Any:
        return _watched(original(map_location), map_location is not None)

    setattr(serialization, torch_private.RESTORE_LOCATION, _get_restore_location)


def _saves(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    for subscriber in events.saves:
        subscriber(obj, f)


def _watched(restore: Callable[[Any, Any], Any], mapped: bool) -> Callable[[Any, Any], Any]:
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


# -- what was built where


def install_loaders(dataloader: ModuleType) -> None:
    """Loaders are built, and their samplers asked."""
    base = torch_private.loader_iterator_base(dataloader)
    if base is None:
        return
    after(base, "_next_index", _indices_drawn)
    after(dataloader.DataLoader, "__setattr__", _attribute_set)


def _indices_drawn(index: Any, iterator: Any) -> None:
    for subscriber in events.indices_drawn:
        subscriber(index, iterator)


def _attribute_set(result: None, loader: Any, attr: str, val: Any) -> None:
    if attr == torch_private.LOADER_BUILT:
        loaders.built_loaders.add(loader, site_of(sys._getframe(3)))


def install_distributed_sampler(module: ModuleType) -> None:
    """Each ``DistributedSampler`` that is made."""
    _notice_built(module.DistributedSampler, "dataset", loaders.built_samplers)


def install_subset(module: ModuleType) -> None:
    """Each ``Subset`` that is made."""
    _notice_built(module.Subset, "indices", loaders.built_subsets)


def _notice_built(made: Any, first: str, book: loaders.Book) -> None:
    """Note things of a class when their ``__init__`` sets the attribute ``first``.

    So no frame of ours is around any part of theirs, and what the class looks like stays the same.
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
