"""DataLoader: how long the training thread waits for a batch, and which epoch it belongs to."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from ddpdoctor.probe.hooks import batch
from ddpdoctor.probe.runtime import events, rank, shield, torch_private, worker_code
from ddpdoctor.probe.runtime.sites import site_of
from ddpdoctor.run.status import NO_EPOCH, Phase

_DATA = int(Phase.DATA)
_HOOK = "dataloader"


def install(module: ModuleType) -> None:
    """Wrap ``_next_data`` of the iterator classes.

    Below ``__next__``, so that the warnings torch raises there still blame the user's line.
    """
    for iterator_class in torch_private.loader_iterator_classes(module):
        _wrap(iterator_class)


def _wrap(iterator_class: Any) -> None:
    original = iterator_class._next_data

    @functools.wraps(original)
    def _next_data(self: Any) -> Any:
        entered = _before(self)
        try:
            data = original(self)
        except BaseException as error:
            shield.hide_frame(error)
            if entered:
                _after(self, None, error)
            raise
        if entered:
            _after(self, data, None)
        return data

    iterator_class._next_data = _next_data


def _before(iterator: Any) -> bool:
    tracker = rank.active
    if tracker is None or _HOOK in shield.off:
        return False
    try:
        first = torch_private.is_first_batch(iterator)
        if first:
            epoch = getattr(torch_private.sampler_of(iterator), "epoch", None)
            iterator._ddpdoctor_epoch = epoch if type(epoch) is int else NO_EPOCH
            worker_code.note(iterator)
        if not tracker.enter(_DATA, site_of(sys._getframe(2))):
            return False
        tracker.fetch(id(iterator), first)
        tracker.epoch = getattr(iterator, "_ddpdoctor_epoch", NO_EPOCH)
    except Exception as error:
        shield.fault(_HOOK, error)
        return False
    return True


def _after(iterator: Any, data: Any, error: BaseException | None) -> None:
    tracker = rank.active
    if tracker is None:
        return
    try:
        ended = isinstance(error, StopIteration)
        tracker.leave(None if ended else error)
        if error is None:
            tracker.step.fetched += batch.size(data)
            for told in events.batch_fetched:
                told(iterator, data)
        elif ended:
            tracker.outside()
            for over in events.loader_exhausted:
                over(iterator)
    except Exception as broken:
        shield.fault(_HOOK, broken)
