"""What scripts call around the loop of training: options, models, samplers, schedulers, files.

Each is a row: what is wrapped, and who hears of it before or after the call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpdoctor.probe.observers import (
    files,
    launch_options,
    modes,
    readback,
    samplers,
    weights,
)
from ddpdoctor.probe.runtime import events, rank, shield, torch_loaders, torch_private
from ddpdoctor.probe.runtime.sites import site_of
from ddpdoctor.probe.runtime.wrapping import after, around, before

CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


def install_argparse(argparse: ModuleType) -> None:
    """``parse_known_args`` is what ``parse_args`` calls, too."""
    before(argparse._ActionsContainer, "add_argument", launch_options.added)
    after(argparse.ArgumentParser, "parse_known_args", launch_options.parsed)


def install_data_parallel(module: ModuleType) -> None:
    """``torch.nn.DataParallel`` is built."""
    before(module.DataParallel, "__init__", launch_options.data_parallel_built)


def install_join(module: ModuleType) -> None:
    """``torch.distributed.algorithms.join.Join``, which DDP's own ``join`` returns."""
    before(module.Join, "__enter__", modes.joined)


def install_module(module: ModuleType) -> None:
    """Weights are loaded into a module; that raises and warns nothing by stack level."""
    after(module.Module, "load_state_dict", _weights_loaded)


def _weights_loaded(result: Any, module: Any, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    weights.loaded(module, state_dict, result)
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
            files.loaded(device, mapped)

    def restore_location(storage: Any, location: Any) -> Any:
        result = restore(storage, location)
        look(getattr(result, "device", None))
        return result

    return restore_location


# -- what was built where


def install_loader(dataloader: ModuleType) -> None:
    """Loaders are built, and their samplers asked."""
    base = torch_loaders.loader_iterator_base(dataloader)
    if base is None:
        return
    after(base, "_next_index", _indices_drawn)
    after(dataloader.DataLoader, "__setattr__", _attribute_set)


def _indices_drawn(index: Any, iterator: Any) -> None:
    for subscriber in events.indices_drawn:
        subscriber(index, iterator)


def _attribute_set(result: None, loader: Any, attr: str, val: Any) -> None:
    if attr == torch_loaders.LOADER_BUILT:
        samplers.loaders.add(loader, site_of(sys._getframe(3)))


def install_distributed_sampler(module: ModuleType) -> None:
    """Each ``DistributedSampler`` that is made."""
    _notice(module.DistributedSampler, "dataset", samplers.samplers)


def install_subset(module: ModuleType) -> None:
    """Each ``Subset`` that is made."""
    _notice(module.Subset, "indices", samplers.subsets)


def _notice(made: Any, first: str, book: samplers.Book) -> None:
    """Note things of a class when their ``__init__`` sets the attribute ``first``.

    So no frame of ours is around any part of theirs, and what the class looks like stays the same.
    """
    if "__setattr__" in vars(made):
        return

    def __setattr__(self: Any, attr: str, val: Any) -> None:
        super(made, self).__setattr__(attr, val)
        if attr == first:
            _note(book, self)

    made.__setattr__ = __setattr__


@shield.shielded
def _note(book: samplers.Book, thing: Any) -> None:
    book.add(thing, site_of(sys._getframe(3)))
