"""Override arguments and seeds of the job. Used only if `ddpdoctor scale` or `parity` asks for it.

Only this hook changes how a job runs. Without the environment variable it installs nothing. Each
override is recorded with the line of the script. An override that fails is recorded as a fault, and
the job then runs unchanged.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import weakref
from types import ModuleType
from typing import Any

from ddpdoctor.probe.runtime import rank, shield
from ddpdoctor.probe.runtime.phases import CudaClock
from ddpdoctor.probe.runtime.sites import caller
from ddpdoctor.run.overrides import DDP, KNOWN, LOADER, SEED, VARIABLE, Value, parse
from ddpdoctor.run.records.process import OverrideRecord
from ddpdoctor.run.status import Phase

_BEHAVIOUR = ("accumulation", "comm_hook", "ddp")  # overrides that are not constructor arguments
_NEED_WORKERS = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")
_MOST = 64


def _wanted(owner: str) -> dict[str, Value]:
    wanted = parse(os.environ.get(VARIABLE, ""))
    return {name: value for name, value in wanted.items() if KNOWN[name].owner == owner}


def install_ddp(module: ModuleType) -> None:
    """Override arguments and behaviour of ``torch.nn.parallel.DistributedDataParallel``."""
    wanted = _wanted(DDP)
    behaviour = {name: wanted.pop(name) for name in _BEHAVIOUR if name in wanted}
    ddp_class = module.DistributedDataParallel
    if wanted:
        _override(ddp_class, wanted)
    if "comm_hook" in behaviour:
        name = str(behaviour["comm_hook"])
        build, register = ddp_class.__init__, ddp_class.register_comm_hook

        @functools.wraps(build)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            build(self, *args, **kwargs)
            hooks = importlib.import_module(
                "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
            )
            register(self, None, getattr(hooks, f"{name}_hook"))
            _note(ddp_class, "comm_hook", name)

        ddp_class.__init__ = __init__
        ddp_class.register_comm_hook = _ignored
    if "accumulation" in behaviour:
        _accumulate(ddp_class, int(behaviour["accumulation"]))
    if "ddp" in behaviour:
        _replace(ddp_class, str(behaviour["ddp"]))


def install_loader(module: ModuleType) -> None:
    """Override arguments of ``torch.utils.data.DataLoader``."""
    wanted = _wanted(LOADER)
    if wanted:
        _override(module.DataLoader, wanted)


SEEDED = {
    "random": ("seed",),
    "numpy.random": ("seed",),
    "torch.random": ("manual_seed",),
    "torch.cuda.random": ("manual_seed", "manual_seed_all"),
}
"""Functions that seed a generator which all libraries share, by module."""

_STRIDE = 1_000_003  # Larger than what a job adds to its seed, such as the rank or the epoch


def install_seed(module: ModuleType) -> None:
    """Move the seeds that the job gives to the shared generators of a module."""
    for name in SEEDED[module.__name__] if _shift() else ():
        _move_seed(module, name, _shift())


def install_first_seed(torch: ModuleType) -> None:
    """Seed torch's own generators, which begin with the same numbers in each process."""
    if _shift():
        torch.manual_seed(torch.initial_seed())


def install_sampler_seed(module: ModuleType) -> None:
    """Move the seeds of ``DistributedSampler``, which are the same on all ranks."""
    shift = _shift()
    if not shift:
        return
    build = module.DistributedSampler.__init__

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.seed += shift

    module.DistributedSampler.__init__ = __init__


def _shift() -> int:
    return _STRIDE * int(_wanted(SEED).get("seed", 0))


def _move_seed(module: ModuleType, name: str, shift: int) -> None:
    original = getattr(module, name)

    def moved(value: Any) -> Any:
        if not hasattr(value, "__index__"):
            return value
        # numpy takes 32 bits.
        return (int(value) + shift) % (1 << 32 if value < 1 << 32 else 1 << 63)

    @functools.wraps(original)
    def seed(*args: Any, **kwargs: Any) -> Any:
        given = {
            key: moved(value) if key in ("seed", "a") else value for key, value in kwargs.items()
        }
        return original(*map(moved, args[:1]), *args[1:], **given)

    setattr(module, name, seed)


def _note(owner: type, name: str, value: object) -> None:
    record = OverrideRecord(owner=owner.__name__, name=name, value=str(value), **caller().place)
    rank.add(record, _MOST, (owner, name, record.path, record.line))


def _override(owner: Any, wanted: dict[str, Value]) -> None:
    """Replace arguments of a constructor."""
    original = owner.__init__
    signature = inspect.signature(original)
    unknown = [name for name in wanted if name not in signature.parameters]
    if unknown:
        raise ValueError(f"this torch's {owner.__name__} has no argument `{unknown[0]}`")

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
            for name, value in wanted.items():
                if name == "batch_size" and (
                    bound.arguments.get("batch_sampler") is not None
                    or bound.arguments.get(name, 1) is None
                ):
                    continue
                _note(owner, name, value)
                bound.arguments[name] = value
            if wanted.get("num_workers") == 0:
                for name in _NEED_WORKERS:
                    bound.arguments.pop(name, None)
            args, kwargs = bound.args[1:], bound.kwargs
        except Exception as error:
            # torch reports errors in the script's arguments.
            shield.fault(f"override of {owner.__name__}", error)
        try:
            original(self, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise

    owner.__init__ = __init__


def _ignored(*args: object, **kwargs: object) -> None:
    """Ignore the script's call to register a hook."""


def _accumulate(ddp_class: Any, every: int) -> None:
    """All-reduce only in every n-th backward. The others run within ``no_sync``."""
    forward = ddp_class.forward
    passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @functools.wraps(forward)
    def accumulating(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in passes:
            _note(ddp_class, "accumulation", every)
        if not sys.modules["torch"].is_grad_enabled() or not self.require_backward_grad_sync:
            return forward(self, *args, **kwargs)
        passes[self] = passes.get(self, 0) + 1
        if passes[self] % every == 0:
            return forward(self, *args, **kwargs)
        with self.no_sync():
            return forward(self, *args, **kwargs)

    ddp_class.forward = accumulating


def _replace(ddp_class: Any, name: str) -> None:
    """Let the constructor return an object of apex's class, so that Python skips ``__init__``."""

    def __new__(cls: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = importlib.import_module("apex.parallel").DistributedDataParallel(module)
        _note(ddp_class, "ddp", name)
        _time(wrapped)
        return wrapped

    ddp_class.__new__ = __new__


@shield.shielded
def _time(wrapped: Any) -> None:
    """Time the forward of a module that is not torch's DDP, and has no timers."""
    state = rank.current()
    if state is None:
        return
    tracker = state.tracker
    device = next(iter(wrapped.parameters())).device
    if device.type == "cuda":
        tracker.use_device(CudaClock(sys.modules["torch"].cuda, device))

    @shield.shielded
    def begins(*args: object) -> None:
        if sys.modules["torch"].is_grad_enabled():
            tracker.forward(True)
        tracker.enter(int(Phase.FORWARD), caller())

    @shield.shielded
    def ended(*args: object) -> None:
        tracker.leave(None)

    wrapped.register_forward_pre_hook(begins)
    wrapped.register_forward_hook(ended)
