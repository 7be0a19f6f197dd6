"""Wrap DistributedDataParallel (construction, forward, buffer broadcast) and other forwards.

The split of a backward into compute and exposed all-reduce comes from DDP's logger
(``_get_ddp_logging_data``), which has the times of an iteration when the next one begins. A clock
around ``backward()`` cannot split it: the all-reduce makes every rank as slow as the slowest.

Forwards without DDP are those of ``fully_shard`` (FSDP2) and of pipeline stages. The outermost one
counts: separately sharded blocks, and forwards repeated by activation checkpointing in backward,
are part of it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType, TracebackType
from typing import Any

from ddpdoctor.probe.hooks import collectives
from ddpdoctor.probe.observers import sample_contents, steps
from ddpdoctor.probe.observers.steps import OpenStep, StepTracker
from ddpdoctor.probe.runtime import (
    events,
    hot,
    phases,
    rank,
    recorder,
    shield,
    sites,
    torch_devices,
    torch_groups,
    torch_private,
)
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer, emit
from ddpdoctor.probe.runtime.hot import Chain
from ddpdoctor.probe.runtime.phases import CudaClock
from ddpdoctor.probe.runtime.wrapping import CODES, after, around
from ddpdoctor.run import status
from ddpdoctor.run.names import BUCKETS, BUFFERS
from ddpdoctor.run.records.model import DdpRecord, Parameter
from ddpdoctor.run.status import Phase

# -- DDP modules

_FORWARD = int(Phase.FORWARD)
_DDP_HOOK = "ddp.forward"
FINALIZE = "DDP's finalize_backward"
"""The name of the wait at the end of a backward that the job finalizes (torch 2.15)."""

SHORT_STEP = 5_000_000  # nanoseconds; in shorter steps DDP's logger (10 us) is asked less often
SHORT_STRIDE = 4
"""One in this many short steps is split, chosen by number so that all ranks split the same ones."""


@dataclass(eq=False)
class _Timed:
    """The values read from the logger of one DDP module, and the step of its next iteration."""

    sampled: bool  # we choose which iterations are timed: those of full steps
    sparse: int = 0
    iteration: int = 0
    step: OpenStep | None = None
    number: int = 0


_lines = Chain(1)
_grad_enabled: Callable[[], bool] = bool
_modules: weakref.WeakKeyDictionary[Any, _Timed] = weakref.WeakKeyDictionary()


def install(module: ModuleType) -> None:
    """Hook ``torch.nn.parallel.distributed.DistributedDataParallel``."""
    global _grad_enabled
    torch = sys.modules["torch"]
    _grad_enabled = torch.is_grad_enabled
    ddp_class = module.DistributedDataParallel
    after(ddp_class, torch_private.DDP_INIT_HELPER, _constructed)
    _wrap_inside(torch, ddp_class)
    around(
        ddp_class,
        torch_private.PRE_FORWARD,
        "ddp.buckets",
        _order_begins,
        _order_ended,
        compiled=True,
        idle=torch_private.REBUILT,
    )
    for name, hook, begin in (
        (torch_private.SYNC_BUFFERS, "ddp.buffers", _sync_begins),
        ("finalize_backward", "ddp.finalize", _finalize_begins),
    ):
        around(ddp_class, name, hook, begin, collectives.waited, compiled=True)


def _constructed(result: None, ddp: Any, *args: Any, **kwargs: Any) -> None:
    state = rank.current()
    if state is None:
        return
    state.tracker.here()
    note(ddp)
    emit(Observer.ddp_built, ddp)


@shield.shielded
def note(ddp: Any) -> None:
    """Record a DDP module, once, and read its device's clock and its logger from now on."""
    state = rank.current()
    if state is None or ddp in _modules:
        return
    torch = sys.modules["torch"]
    device = str(getattr(ddp, "device", None) or next(iter(ddp.parameters())).device)
    cuda = device.startswith("cuda")
    if cuda:
        state.tracker.use_device(CudaClock(torch.cuda, torch.device(device)))
    elif device == "cpu":
        torch_private.sample(ddp, 1)
    else:
        state.tracker.use_memory(torch.device(device))
    _modules[ddp] = _Timed(device == "cpu")
    numbers = torch_private.logging_ints(ddp) or {}
    state.recorder.add(
        DdpRecord(
            time=time.time_ns(),
            module=type(ddp.module).__name__,
            device=device,
            device_name="" if device == "cpu" else torch_devices.name_of(device),
            device_uuid=torch_private.device_uuid(torch, device) if cuda else "",
            device_uuids=_uuids(torch, ddp.module),
            group_ranks=tuple(torch_groups.group_ranks(ddp)),
            bucket_cap_bytes=numbers.get("bucket_cap_bytes"),
            find_unused_parameters=bool(ddp.find_unused_parameters),
            parameters=tuple(
                Parameter(name, tuple(parameter.shape), torch_private.dtype_name(parameter))
                for name, parameter in torch_private.reduced_parameters(ddp)
            ),
            buffers=sum(1 for _ in ddp.module.buffers()),
            **sites.caller().place,
        )
    )


def forget() -> None:
    """Let the loggers of all modules time as few iterations as torch does."""
    for ddp, timed in list(_modules.items()):
        if timed.sampled:
            torch_private.sample(ddp, torch_private.SAMPLE_RATE)
    _modules.clear()


def _uuids(torch: Any, module: Any) -> tuple[str, ...]:
    """Return the GPUs of a module. There are several if the module is model-parallel."""
    devices = {each.device for each in (*module.parameters(), *module.buffers())}
    uuids = (torch_private.device_uuid(torch, each) for each in devices if each.type == "cuda")
    return tuple(sorted(uuid for uuid in uuids if uuid))


# -- forward

Before = Callable[[Any, FrameType], "StepTracker | None"]


class _Forward:
    """Wrap DDP's own context around the wrapped module's forward.

    The compiled version handles light steps without calling `_before`.

    Args:
        ddp: The module.
        context: DDP's own context.
        before: Called first, with the module and the frame of the forward. Returns the tracker
            whose phase must be left.
    """

    __slots__ = ("_before", "_context", "_ddp", "_entered")

    def __init__(self, ddp: Any, context: Any, before: Before) -> None:
        self._ddp = ddp
        self._context = context
        self._before = before

    def __enter__(self) -> None:
        self._entered = self._before(self._ddp, sys._getframe(1))
        self._context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        tracker = self._entered
        if tracker is not None:
            try:
                tracker.leave(error)
                if error is None and not _grad_enabled():
                    tracker.evaluated()
            except Exception as broken:
                shield.fault(_DDP_HOOK, broken)
        return self._context.__exit__(kind, error, traceback)


def _wrap_inside(torch: Any, ddp_class: Any) -> None:
    original: Any = torch_private.inside_forward(ddp_class)
    if original is None:
        return
    torch_private.skip_wrappers(torch, CODES)
    here = sys.modules[__name__]
    ours = (collectives, events, phases, recorder, sample_contents, sites, status, steps)
    torch_private.skip_frames(torch, (here, torch_private, *ours))
    # Call the unwrapped function: torch has disabled Dynamo for it, and we do that outside.
    bare = contextmanager(inspect.unwrap(original))
    forward: Any = _Forward if hot.core is None else hot.core.Forward

    # Leave out its attributes, by which Dynamo would find the original.
    @functools.wraps(original, updated=())
    def _inside_ddp_forward(self: Any) -> Any:
        context = bare(self)
        return context if rank.active is None else forward(self, context, _before)

    ddp_class._inside_ddp_forward = torch_private.disable_dynamo(torch, _inside_ddp_forward, False)


def _before(ddp: Any, frame: FrameType) -> StepTracker | None:
    tracker = rank.active
    if tracker is None or _DDP_HOOK in shield.off:
        return None
    trains = _grad_enabled()
    began = clock() if tracker.clocked or not trains else 0
    try:
        if trains:
            armed = ddp.require_backward_grad_sync
            tracker.forward(armed)
            if armed:
                _listen(ddp, tracker)
            for subscriber in events.forward_begins:
                subscriber(ddp, armed)
        else:
            tracker.evaluating()
            emit(Observer.evaluation_begins, ddp)
        if not tracker.enter(_FORWARD, _lines.sites()[0]):
            return None
        if not tracker.light and not tracker.step.fetched:
            # The frame is DDP's _run_ddp_forward, which holds the inputs.
            given, named = map(frame.f_locals.get, ("inputs", "kwargs"))
            size = sample_contents.batch_size
            tracker.step.fed += size(given) or size(named)
            if trains:
                emit(Observer.inputs_given, given or named)
    except Exception as error:
        shield.fault(_DDP_HOOK, error)
        return None
    if tracker.clocked:
        tracker.spent += clock() - began
    if not trains:
        tracker.detail.charge(began)
    return tracker


def _listen(ddp: Any, tracker: StepTracker) -> None:
    """Add the times of DDP's logger, those of the last iteration, to the step of that iteration."""
    timed = _modules.get(ddp)
    if timed is None:
        return
    step, number, now = timed.step, timed.number, tracker.steps
    timed.step, timed.number = tracker.step, now
    sparse = tracker.detail.sparse
    if sparse != timed.sparse:
        timed.sparse = sparse
        if timed.sampled:
            torch_private.sample(ddp, sparse + 1)
    if 0 < tracker.last_total < SHORT_STEP:
        sparse |= SHORT_STRIDE - 1
    # Light steps may have passed since.
    if step is None or (number + 1) & sparse or now > number + 1:
        return
    numbers = torch_private.logging_ints(ddp)
    if numbers is None:
        return
    iteration = numbers.get("iteration", 0)
    if iteration != timed.iteration:
        timed.iteration = iteration
        step.timed += 1
        # If the job finalizes an iteration, the wait is outside of its backward.
        if not getattr(ddp, "require_manual_backward_finalization", False):
            hidden = numbers.get("backward_compute_comm_overlap_time", 0)
            step.exposed += max(0, numbers.get("backward_comm_time", 0) - hidden)


# -- the order of buckets, and buffers

_ordering: Any = None
"""The DDP module that is about to broadcast or receive the order of its buckets."""


def _order_begins(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Begin a wait if a forward may broadcast the order of ready gradients, once in a job.

    A forward within ``no_sync`` does so as well.
    """
    global _ordering
    if not _grad_enabled():
        return None
    timed = _modules.get(ddp)
    if timed is None or timed.step is None:
        return None
    if (ddp.static_graph or not ddp.find_unused_parameters) and collectives.enter(BUCKETS):
        _ordering = ddp
        return ddp
    return None


def _order_ended(ddp: Any, result: object, error: BaseException | None) -> None:
    global _ordering
    if _ordering is ddp:
        _ordering = None
        collectives.leave(error)


def _sync_begins(ddp: Any) -> bool | None:
    _order_ended(ddp, None, None)
    for subscriber in events.buffers_begin:
        subscriber(ddp)
    return collectives.enter(BUFFERS) or None


def _finalize_begins(ddp: Any) -> bool | None:
    return collectives.enter(FINALIZE) or None


# -- forwards without DDP: ``fully_shard`` (FSDP2), and stages of pipelines

_BETWEEN = (int(Phase.STARTING), int(Phase.OTHER))
_FORWARD_HOOK = "forward"


def install_stage_forwards(module: ModuleType) -> None:
    """Follow forwards of micro-batches, except those of DDP modules."""
    stage_class = getattr(module, torch_private.STAGE, None)
    around(
        stage_class, torch_private.STAGE_FORWARD, _FORWARD_HOOK, _micro_batch_begins, _forward_ended
    )


def _micro_batch_begins(stage: Any, *args: Any, **kwargs: Any) -> bool | None:
    tracker = rank.active
    if tracker is None or tracker.phase not in _BETWEEN or torch_private.is_ddp(stage.submod):
        return None
    return tracker.enter(_FORWARD, sites.caller()) or None


def install_sharded(module: ModuleType) -> None:
    """Wrap ``FSDPModule.__call__``. ``fully_shard`` makes this class a module's first base.

    A hook in the module would be pickled with it, and one around FSDP's own hooks would not notice
    that a forward raised.
    """
    sharded = getattr(module, "FSDPModule", None)
    if sharded is None or "__call__" in vars(sharded):
        return

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = _sharded_begins()
        try:
            result = super(sharded, self).__call__(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            if begun:
                _sharded_ended(error)
            raise
        if begun:
            _sharded_ended(None)
        return result

    torch = sys.modules["torch"]
    sharded.__call__ = torch_private.disable_dynamo(torch, __call__, False)


def _sharded_begins() -> bool:
    tracker = rank.active
    if tracker is None or tracker.phase not in _BETWEEN or _FORWARD_HOOK in shield.off:
        return False
    try:
        if not tracker.is_here():
            return False
        if sys.modules["torch"].is_grad_enabled():
            tracker.forward(False)
        else:
            tracker.evaluating()
        return tracker.enter(_FORWARD, sites.caller())
    except Exception as error:
        shield.fault(_FORWARD_HOOK, error)
    return False


def _sharded_ended(error: BaseException | None) -> None:
    try:
        _forward_ended(True, None, error)
        tracker = rank.active
        if tracker is not None and error is None and not sys.modules["torch"].is_grad_enabled():
            tracker.evaluated()
    except Exception as broken:
        shield.fault(_FORWARD_HOOK, broken)


def _forward_ended(begun: bool, result: Any, error: BaseException | None) -> None:
    tracker = rank.active
    if tracker is not None:
        tracker.leave(error)
