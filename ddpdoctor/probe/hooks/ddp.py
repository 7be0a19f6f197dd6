"""DistributedDataParallel: how it was built, its forward, its buffer broadcast, its own timers.

The split of a backward into compute and exposed all-reduce comes from DDP's logger
(``_get_ddp_logging_data``). It tells of an iteration when the next one begins, and a wall-clock
around ``backward()`` cannot: the all-reduce makes every rank as slow as the slowest.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any

from ddpdoctor.probe.hooks import batch, collectives
from ddpdoctor.probe.observers import steps
from ddpdoctor.probe.observers.steps import OpenStep, StepTracker
from ddpdoctor.probe.runtime import events, rank, recorder, shield, sites, torch_private
from ddpdoctor.probe.runtime.clocks import CudaClock
from ddpdoctor.run import status
from ddpdoctor.run.names import BUCKETS, BUFFERS
from ddpdoctor.run.status import Phase

_FORWARD = int(Phase.FORWARD)
_HOOK = "ddp.forward"
FINALIZE = "DDP's finalize_backward"
"""The same of the wait at the end of a backward that the job finishes itself."""

SHORT = 5_000_000
"""Nanoseconds below which a step is too short to ask DDP's logger (10 us) every time."""

SHORT_STRIDE = 4
"""Of short steps, every fourth is split; by number, so that all ranks split the same ones."""


class _Told:
    """What was read of one DDP module's logger, and the step it will speak of next."""

    __slots__ = ("iteration", "step")

    def __init__(self) -> None:
        self.iteration = 0
        self.step: OpenStep | None = None


_grad_enabled: Callable[[], bool] = bool
_modules: weakref.WeakKeyDictionary[Any, _Told] = weakref.WeakKeyDictionary()


def install(module: ModuleType) -> None:
    """Hook ``torch.nn.parallel.distributed.DistributedDataParallel``."""
    global _grad_enabled
    torch = sys.modules["torch"]
    _grad_enabled = torch.is_grad_enabled
    ddp_class = module.DistributedDataParallel
    helper = torch_private.ddp_init_helper(ddp_class)
    if helper is not None:
        _wrap_helper(ddp_class, helper)
    inside = torch_private.inside_forward(ddp_class)
    if inside is not None:
        _wrap_inside(torch, ddp_class, inside)
    before = torch_private.pre_forward(ddp_class)
    if before is not None:
        _wrap_before(ddp_class, before)
    sync = torch_private.sync_buffers(ddp_class)
    if sync is not None:
        _wrap_sync(torch, ddp_class, sync)
    if hasattr(ddp_class, "finalize_backward"):
        _wrap_finalize(ddp_class, ddp_class.finalize_backward)


# -- construction


def _wrap_helper(ddp_class: Any, original: Any) -> None:
    @functools.wraps(original)
    def _ddp_init_helper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        static_graph = kwargs.get("static_graph", args[3] if len(args) > 3 else False)
        _built(self, bool(static_graph))
        if rank.active is not None:
            for told in events.ddp_built:
                told(self)
        return result

    ddp_class._ddp_init_helper = _ddp_init_helper


@shield.shielded
def _built(ddp: Any, static_graph: bool) -> None:
    state = rank.current()
    if state is None:
        return
    torch = sys.modules["torch"]
    state.tracker.here()
    device = str(getattr(ddp, "device", None) or next(iter(ddp.parameters())).device)
    if device.startswith("cuda"):
        state.tracker.use_device(CudaClock(torch.cuda, torch.device(device)))
    elif device == "cpu":
        torch_private.sample_every_step(ddp)
    _modules[ddp] = _Told()
    words = torch_private.logging_strings(ddp)
    numbers = torch_private.logging_ints(ddp) or {}
    site = sites.caller()
    state.recorder.add(
        {
            "kind": "ddp",
            "time": time.time_ns(),
            "module": type(ddp.module).__name__,
            "device": device,
            "device_name": torch.cuda.get_device_name(device) if device[:4] == "cuda" else "",
            "device_uuid": torch_private.device_uuid(torch, device) if device[:4] == "cuda" else "",
            "device_uuids": _uuids(torch, ddp.module),
            "device_ids": ddp.device_ids,
            "group_ranks": torch.distributed.get_process_group_ranks(ddp.process_group),
            "bucket_cap_bytes": numbers.get("bucket_cap_bytes"),
            "bucket_sizes": words.get("bucket_sizes", ""),
            "find_unused_parameters": bool(ddp.find_unused_parameters),
            "static_graph": static_graph,
            "gradient_as_bucket_view": bool(ddp.gradient_as_bucket_view),
            # Under this name up to 2.12, forward_sync_buffers from 2.13 on.
            "broadcast_buffers": bool(
                getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True))
            ),
            "parameters": [
                [name, list(parameter.shape), str(parameter.dtype).removeprefix("torch.")]
                for name, parameter in torch_private.reduced_parameters(ddp)
            ],
            "buffers": sum(1 for _ in ddp.module.buffers()),
            "path": site.path,
            "line": site.line,
        }
    )


def _uuids(torch: Any, module: Any) -> list[str]:
    """The GPUs that a module lies on, which are several where it is parallel itself."""
    devices = {each.device for each in (*module.parameters(), *module.buffers())}
    uuids = (torch_private.device_uuid(torch, each) for each in devices if each.type == "cuda")
    return sorted(uuid for uuid in uuids if uuid)


# -- forward


class _Forward:
    """DDP's own context around the wrapped module's forward, with ours around it."""

    __slots__ = ("_context", "_ddp", "_entered")

    def __init__(self, ddp: Any, context: Any) -> None:
        self._ddp = ddp
        self._context = context
        self._entered = False

    def __enter__(self) -> None:
        self._entered = _before(self._ddp)
        self._context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        if self._entered:
            _after(error)
        return self._context.__exit__(kind, error, traceback)


def _wrap_inside(torch: Any, ddp_class: Any, original: Any) -> None:
    torch_private.skip_frames(
        torch,
        (sys.modules[__name__], batch, collectives, status, recorder, sites, steps, torch_private),
    )

    # Bare, without its own shield from Dynamo: ours stands outside of it.
    bare = contextmanager(inspect.unwrap(original))

    def _inside_ddp_forward(self: Any) -> Any:
        context = bare(self)
        return context if rank.active is None else _Forward(self, context)

    ddp_class._inside_ddp_forward = torch_private.disable_dynamo(torch, _inside_ddp_forward, False)


def _before(ddp: Any) -> bool:
    tracker = rank.active
    if tracker is None or _HOOK in shield.off:
        return False
    try:
        # The caller is DDP's _run_ddp_forward, which holds the inputs.
        frame = sys._getframe(2)
        if _grad_enabled():
            armed = ddp.require_backward_grad_sync
            tracker.forward(armed)
            if armed:
                _listen(ddp, tracker)
            for told in events.forward_begins:
                told(ddp, armed)
        else:
            tracker.evaluating()
            for looks in events.evaluation_begins:
                looks(ddp)
        step = tracker.step
        if not tracker.enter(_FORWARD, sites.site_of(frame)):
            return False
        if not step.fetched:
            inputs = frame.f_locals
            step.fed += batch.size(inputs.get("inputs")) or batch.size(inputs.get("kwargs"))
    except Exception as error:
        shield.fault(_HOOK, error)
        return False
    return True


def _listen(ddp: Any, tracker: StepTracker) -> None:
    """Attribute what DDP's logger tells, which is the last iteration, to that one's step."""
    told = _modules.get(ddp)
    if told is None:
        return
    step, told.step = told.step, tracker.step
    if step is None or (step.number % SHORT_STRIDE and 0 < step.total < SHORT):
        return
    numbers = torch_private.logging_ints(ddp)
    if numbers is None:
        return
    iteration = numbers.get("iteration", 0)
    if iteration != told.iteration:
        told.iteration = iteration
        step.told += 1
        if getattr(ddp, "require_manual_backward_finalization", False):
            # It is waited for outside of backward.
            return
        step.exposed += max(
            0,
            numbers.get("backward_comm_time", 0)
            - numbers.get("backward_compute_comm_overlap_time", 0),
        )


def _after(error: BaseException | None) -> None:
    try:
        tracker = rank.active
        if tracker is not None:
            tracker.leave(error)
            if error is None and not _grad_enabled():
                tracker.evaluated()
    except Exception as broken:
        shield.fault(_HOOK, broken)


# -- the order of buckets


_ordering: Any = None
"""The DDP module that is about to tell, or to be told, the order of its buckets."""


def _wrap_before(ddp_class: Any, original: Any) -> None:
    @functools.wraps(original)
    def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        global _ordering
        if rank.is_compiling() or rank.active is None or not _orders_buckets(self):
            return original(self, *inputs, **kwargs)
        if collectives.enter(BUCKETS):
            _ordering = self
        try:
            result = original(self, *inputs, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            _ordered(self, error)
            raise
        _ordered(self, None)
        return result

    ddp_class._pre_forward = _pre_forward


def _orders_buckets(ddp: Any) -> bool:
    """Whether a forward may broadcast the order in which gradients became ready, once in a job.

    It does so by itself also where its own backward is not reduced (``no_sync``).
    """
    if getattr(ddp, "_has_rebuilt_buckets", True) or not _grad_enabled():
        return False
    told = _modules.get(ddp)
    reduced = told is not None and told.step is not None
    return reduced and (ddp.static_graph or not ddp.find_unused_parameters)


def _ordered(ddp: Any, error: BaseException | None) -> None:
    global _ordering
    if _ordering is ddp:
        _ordering = None
        collectives.leave(error)


# -- buffers


def _wrap_sync(torch: Any, ddp_class: Any, original: Any) -> None:
    @functools.wraps(original)
    def _sync_buffers(self: Any) -> Any:
        if rank.active is None or rank.is_compiling():
            return original(self)
        _ordered(self, None)
        for told in events.buffers_begin:
            told(self)
        entered = collectives.enter(BUFFERS)
        try:
            result = original(self)
        except BaseException as error:
            shield.hide_frame(error)
            if entered:
                collectives.leave(error)
            raise
        if entered:
            collectives.leave(None)
        return result

    ddp_class._sync_buffers = _sync_buffers


# -- the end of a backward that the job finishes itself (2.15)


def _wrap_finalize(ddp_class: Any, original: Any) -> None:
    @functools.wraps(original)
    def finalize_backward(self: Any) -> Any:
        if rank.active is None or rank.is_compiling():
            return original(self)
        entered = collectives.enter(FINALIZE)
        try:
            result = original(self)
        except BaseException as error:
            shield.hide_frame(error)
            if entered:
                collectives.leave(error)
            raise
        if entered:
            collectives.leave(None)
        return result

    ddp_class.finalize_backward = finalize_backward
