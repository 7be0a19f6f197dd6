"""Use torch's private APIs: which versions have them, and what happens without.

Every access goes through here, or through `torch_groups` for process groups, and is guarded by the
feature, not by a version number. Public APIs
(``torch.optim.optimizer.register_optimizer_step_pre_hook``, ``torch.distributed``, ``GradScaler``)
are used directly by their hooks. Versions are those whose sources were read, 2.13 and 2.15 among
them; 2.14 was not.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any

# -- the private torch APIs the probe uses: which versions have them, and what happens without


MOST_STREAMS = 64
"""Streams that are remembered; torch has 32 of a priority for a device."""

_saved: weakref.WeakKeyDictionary[type[Any], tuple[str, ...]] = weakref.WeakKeyDictionary()


# -- functions that hooks wrap; where there is none, that hook is not installed

DDP_INIT_HELPER = "_ddp_init_helper"
"""Of DistributedDataParallel (2.4 to 2.15): builds reducer and logger.

Inside ``__init__``, whose own warnings so still blame the user's line. Without it nothing is
recorded of how DDP was built, and backward is not split.
"""

PRE_FORWARD = "_pre_forward"
"""Of the same (2.4 to 2.15), where buckets are ordered once: a wait there is ``other`` without."""

REBUILT = "_has_rebuilt_buckets"
"""Set on a DDP module (2.4 to 2.15) once its buckets are in order: no wait comes there any more."""

SYNC_BUFFERS = "_sync_buffers"
"""Of the same (2.4 to 2.15), the broadcast before forward: a wait there is ``other`` without."""

VERIFY_PARAMETERS = "_verify_param_shape_across_processes"
"""Of its module (2.0 to 2.15), which DDP's constructor calls first.

Without it, models that differ between ranks are known by DDP's exception alone.
"""

ENGINE = "_engine_run_backward"
"""Of ``torch.autograd`` (2.3 to 2.15), which ``backward`` and ``grad`` call.

Without it backward counts as ``other``.
"""

PATCH_STEP = "_patch_step_function"
"""Of ``Optimizer`` (2.4 to 2.15), which every new optimizer calls.

Without it every job is taken to have an optimizer.
"""

REDUCE_LR = "_reduce_lr"
"""Of ``ReduceLROnPlateau`` (1.0 to 2.15), called when it cuts the learning rate.

Below ``step``, whose own warnings so still blame the user's line. Without it a difference of
learning rates is placed at the optimizer's step.
"""

RESTORE_LOCATION = "_get_restore_location"
"""Of ``torch.serialization`` (1.0 to 2.15), asked once in each load.

Given ``map_location`` it returns what puts a storage on its device. Without it it is not known
which line loaded onto another rank's GPU.
"""


STAGE = "_PipelineStageBase"
"""Of ``torch.distributed.pipelining.stage`` (2.4 to 2.15), the base of all stages.

Without it ranks of a pipeline are compared as if they did the same work.
"""

STAGE_FORWARD = "forward_maybe_with_nosync"
"""Of that base (2.4 to 2.15), the forward of a micro-batch, ``other`` without it."""

INIT_OPTIMIZER = "_init_optim_state"
"""Of ``torch.distributed.checkpoint.state_dict`` (2.2 to 2.15), which steps a new optimizer once.

Without it that counts as a step of the training.
"""


def is_ddp(module: Any) -> bool:
    """Whether it is a DistributedDataParallel."""
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    return parallel is not None and isinstance(module, parallel.DistributedDataParallel)


def inside_forward(ddp_class: Any) -> Any:
    """``DistributedDataParallel._inside_ddp_forward`` (2.4 to 2.15), a context manager.

    It surrounds the wrapped module's forward, and Dynamo already breaks there: a hook in it adds no
    graph break to ``torch.compile(ddp)``, where one around ``forward`` does (measured on 2.13).
    Without it forward counts as ``other`` and steps need an optimizer.
    """
    return getattr(ddp_class, "_inside_ddp_forward", None)


def sample(ddp: Any, every: int) -> bool:
    """Have DDP's logger time every so many iterations: ``_set_ddp_runtime_logging_sample_rate``.

    For ranks on the CPU only: on CUDA the sampled iterations read events, so torch's own rate
    (the first ten, then every hundredth) stays. Without it only those iterations are split.
    """
    setter = getattr(ddp, "_set_ddp_runtime_logging_sample_rate", None)
    if setter is None:
        return False
    setter(every)
    return True


def logging_ints(ddp: Any) -> dict[str, int] | None:
    """The numbers of DDP's logger, nanoseconds (``Logger._get_ddp_logging_data``, 2.4 to 2.15)."""
    logger = getattr(ddp, "logger", None)
    getter = getattr(logger, "_get_ddp_logging_data", None)
    return None if getter is None else getter().ints_map


def logging_strings(ddp: Any) -> dict[str, str]:
    """The words of DDP's logger (bucket sizes, dtypes), empty where there is none."""
    logger = getattr(ddp, "logger", None)
    getter = getattr(logger, "_get_ddp_logging_data", None)
    return {} if getter is None else dict(getter().strs_map)


def reduced_parameters(ddp: Any) -> list[tuple[str, Any]]:
    """Names and parameters that DDP reduces: all that require gradients and are not ignored."""
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    return [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def accumulator(parameter: Any) -> Any:
    """The node of autograd that accumulates a parameter's gradient; the idiom is as old as DDP's.

    DDP keeps it alive by its own hooks on it. None where gradients are off: then only losses show
    which rank had the first NaN.
    """
    torch: Any = sys.modules["torch"]
    with torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    return function.next_functions[0][0] if function is not None else None


def compiles_autograd() -> bool:
    """Whether compiled autograd is on, which would trace a hook on a node (2.4 on)."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(getattr(dynamo.config, "compiled_autograd", False))


def hook_again(handle: Any, hook: Any) -> bool:
    """Put a hook back where it was before its ``RemovableHandle`` removed it; whether that is left.

    To find a node of autograd again takes 80 us. False where handles have no ``hooks_dict_ref``.
    """
    reference = getattr(handle, "hooks_dict_ref", None)
    hooks: Any = None if reference is None else reference()
    if hooks is not None:
        hooks[handle.id] = hook
    return hooks is not None


def frozen_parameters(ddp: Any) -> list[Any]:
    """Parameters that require no gradient, but those that DDP is to ignore."""
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    return [
        parameter
        for name, parameter in ddp.module.named_parameters()
        if not parameter.requires_grad and name not in ignored
    ]


def gradient_ready_times(ddp: Any) -> list[int] | None:
    """When each reduced parameter's gradient was ready: ``get_backward_stats`` (1.9 to 2.15).

    A time of 0 says never, one that did not change since the last reading: not in the last backward
    either. Without it, a parameter without a gradient is known by ``p.grad is None`` alone.
    """
    getter = getattr(getattr(ddp, "reducer", None), "get_backward_stats", None)
    return None if getter is None else list(getter())


def used_map(ddp: Any) -> Any:
    """On how many ranks each parameter was used: ``_get_local_used_map`` (1.10 to 2.15), or None.

    A tensor on DDP's device, summed over the ranks where ``find_unused_parameters`` is on. Without
    it an unneeded flag is not found.
    """
    getter = getattr(getattr(ddp, "reducer", None), "_get_local_used_map", None)
    return None if getter is None else getter()


def joins(ddp: Any) -> bool:
    """Whether a DDP module runs, or ever ran, within ``join()``: ``_join_config`` (2.4 to 2.15).

    Without it uneven inputs would be reported there, too.
    """
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def is_enabled(join: Any) -> bool:
    """Whether a ``Join`` does anything: ``_enable`` (1.10 to 2.15), else it is taken to."""
    return bool(getattr(join, "_enable", True))


def comm_hook(ddp: Any) -> str:
    """The name of DDP's communication hook: ``_comm_hooks`` (2.2 to 2.15), empty without one.

    Without it a local SGD is known by its averaging alone.
    """
    hooks = getattr(ddp, "_comm_hooks", None) or [(None, None)]
    return str(getattr(hooks[-1][0], "__name__", ""))


def is_sharded(optimizer: Any) -> bool:
    """Whether an optimizer keeps another part of the state on each rank, as ZeRO does."""
    return any(each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__)


def normalizes_alone(module: Any) -> bool:
    """Whether a module is a BatchNorm that takes its statistics from one rank's batch.

    ``torch.nn.modules.batchnorm._BatchNorm`` (1.0 to 2.15) is the base of all of them,
    ``SyncBatchNorm`` among them. Without it no small batch is found.
    """
    torch: Any = sys.modules["torch"]
    base = getattr(torch.nn.modules.batchnorm, "_BatchNorm", None)
    return (
        base is not None
        and isinstance(module, base)
        and not isinstance(module, torch.nn.SyncBatchNorm)
    )


def keeps_statistics(module: Any) -> bool:
    """Whether a module is a BatchNorm or InstanceNorm: ``_NormBase`` (1.4 to 2.15).

    Without it their statistics are known by their names alone.
    """
    torch: Any = sys.modules["torch"]
    base = getattr(torch.nn.modules.batchnorm, "_NormBase", None)
    return base is not None and isinstance(module, base)


def unsaved_buffers(module: Any) -> set[str]:
    """The buffers that are no part of the state dict: ``_non_persistent_buffers_set`` (1.6 on).

    Without it all are taken to be.
    """
    return getattr(module, "_non_persistent_buffers_set", None) or set()


def broadcasts_buffers(ddp: Any) -> bool | None:
    """Whether DDP is to broadcast the buffers before a forward; None if a hook of the user's does.

    ``forward_sync_buffers`` from 2.13 on, before it ``broadcast_buffers``; ``buffer_hook`` and
    ``modules_buffers`` (1.9 to 2.15). Without these buffers are not compared.
    """
    if hasattr(ddp, "buffer_hook") or not hasattr(ddp, "modules_buffers"):
        return None
    return syncs_buffers(ddp)


def syncs_buffers(ddp: Any) -> bool:
    """What the user asked for: ``broadcast_buffers`` up to 2.12, then ``forward_sync_buffers``."""
    return bool(getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True)))


def dtype_name(tensor: Any) -> str:
    """``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def scale_of(scaler: Any) -> Any:
    """A GradScaler's scale, a tensor on its device: ``_scale`` (1.6 to 2.15), or None.

    ``get_scale`` would wait for a GPU. Without it scales are not compared.
    """
    return getattr(scaler, "_scale", None)


def device_uuid(torch: Any, device: Any) -> str:
    """The UUID of a CUDA device: ``get_device_properties(device).uuid`` (2.5 to 2.15).

    Empty without it, and while CUDA is not initialized: then a rank's GPUs are not known.
    """
    if not torch.cuda.is_initialized():
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def current_stream(cuda: Any, device: Any) -> Callable[[], Any]:
    """What gives the current stream of a CUDA device, without making an object of it each time.

    ``torch._C._cuda_getCurrentRawStream`` (1.12 to 2.15) gives the stream's address for a third of
    the price of ``torch.cuda.current_stream``, which is asked where the address is a new one, and
    each time where there is no such function.
    """
    address = getattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", None)
    index = device.index if device.index is not None else cuda.current_device()
    if address is None:
        return lambda: cuda.current_stream(device)
    known: dict[int, Any] = {}

    def current() -> Any:
        at = address(index)
        stream = known.get(at)
        if stream is None:
            if len(known) >= MOST_STREAMS:
                known.clear()
            stream = known[at] = cuda.current_stream(device)
        return stream

    return current


def saved_tensors(node: Any) -> tuple[list[tuple[bool, Any]], bool]:
    """What an operation keeps for its backward: whether it is its own result, and the tensor.

    With it, whether that is all of it.

    ``_raw_saved_*`` and ``_saved_*`` of a node (1.9 to 2.15); ``unpack_hook`` of a saved tensor
    (2.13 to 2.15) says that to unpack it is to call a hook of the job, such as checkpointing's,
    and then it is left out. Without that, what operations keep is not known.
    """
    found = []
    complete = True
    for name in _saved_names(type(node)):
        raw = getattr(node, name)
        many = isinstance(raw, (tuple, list))
        if any(getattr(each, "unpack_hook", raw) is not None for each in (raw if many else (raw,))):
            complete = False
            continue
        # A function of the job's own keeps them as ``saved_tensors``.
        plain = "saved_tensors" if name == "_raw_saved_tensors" else name.removeprefix("_raw")
        try:
            saved = getattr(node, plain)
        except RuntimeError:
            # Freed by an earlier backward, or changed in place since.
            complete = False
            continue
        for tensor in saved if isinstance(saved, (tuple, list)) else (saved,):
            if tensor is not None:
                own = tensor.grad_fn is node or name.startswith("_raw_saved_result")
                found.append((own, tensor))
    return found, complete


def sequence_of(node: Any) -> int:
    """Which of a thread's operations it was: later ones have greater numbers; -1 if unknown.

    ``_sequence_nr`` of a node (2.0 to 2.15).
    """
    number = getattr(node, "_sequence_nr", None)
    return int(number()) if number is not None else -1


def _saved_names(operation: type[Any]) -> tuple[str, ...]:
    """The attributes under which an operation keeps tensors: to list them takes the most time."""
    found = _saved.get(operation)
    if found is None:
        found = tuple(name for name in dir(operation) if name.startswith("_raw_saved_"))
        _saved[operation] = found
    return found


def largest(torch: Any, tensors: list[Any]) -> Any:
    """The greatest magnitude in each tensor, as one vector in double precision.

    ``_foreach_norm`` (1.13 to 2.15) launches few kernels for many tensors of a device and dtype;
    without it there is one for each.
    """
    together = getattr(torch, "_foreach_norm", None)
    if together is not None:
        return torch.stack(together(tensors, math.inf)).double()
    return torch.stack([torch.linalg.vector_norm(each, ord=math.inf) for each in tensors]).double()


# -- the private parts of Dynamo that the probe uses


def skip_frames(torch: Any, modules: Iterable[ModuleType]) -> None:
    """Have Dynamo leave the functions of ``modules`` alone, with all that they call.

    They run between the graphs of a compiled region. ``torch._C._dynamo.eval_frame`` marks code
    objects at no cost per call: ``set_code_exec_strategy`` (2.7 to 2.15), ``skip_code`` before.
    Without either, Dynamo compiles them: slower to warm up, the same results.
    """
    mark = _marker(getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None))
    if mark is None:
        return
    for module in modules:
        for owner in (module, *(v for v in vars(module).values() if isinstance(v, type))):
            for value in vars(owner).values():
                if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                    mark(value.__code__)


def skip_wrappers(torch: Any, codes: Iterable[CodeType]) -> None:
    """Have Dynamo leave functions alone that call others of the job's, but not those others."""
    mark = _marker(getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None), within=False)
    if mark is not None:
        for code in codes:
            mark(code)


def _marker(eval_frame: Any, within: bool = True) -> Callable[[CodeType], object] | None:
    setter = getattr(eval_frame, "set_code_exec_strategy", None)
    action = getattr(eval_frame, "_FrameAction", None)
    strategy = getattr(eval_frame, "_FrameExecStrategy", None)
    if setter is not None and action is not None and strategy is not None:
        skip = strategy(action.SKIP, action.SKIP if within else action.DEFAULT)
        return lambda code: setter(code, skip)
    older: Callable[[CodeType], object] | None = getattr(eval_frame, "skip_code", None)
    return older


def disable_dynamo(torch: Any, function: Any, recursive: bool) -> Any:
    """``torch._disable_dynamo`` (2.4 to 2.15), which imports Dynamo only when first called.

    Without it the function is returned as it is.
    """
    disable = getattr(torch, "_disable_dynamo", None)
    return function if disable is None else disable(function, recursive=recursive)


def has_compiled() -> bool:
    """Whether ``torch.compile`` took functions here: ``torch._dynamo.utils.counters``, 2.0 to 2.15.

    Without it users do not learn that breakpoints in such functions are not hit (debugpy#999).
    """
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    # Not by index: these make an entry where there is none, and they are the job's.
    return bool((counters or {}).get("frames", {}).get("ok"))


# -- the private parts of ``torch.utils.data.dataloader`` that the probe reads


def loader_iterator_classes(dataloader: Any) -> list[Any]:
    """The classes of ``torch.utils.data.dataloader`` that have a ``_next_data`` (2.4 to 2.15).

    Without them data waits count as ``other``.
    """
    names = ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")
    classes = [getattr(dataloader, name, None) for name in names]
    return [each for each in classes if "_next_data" in vars(each or object)]


def is_first_batch(iterator: Any) -> bool:
    """Whether a loader's iterator was never asked before: ``_num_yielded`` (2.4 to 2.15).

    Without it the time between epochs is charged to the first step of the next.
    """
    return getattr(iterator, "_num_yielded", None) == 0


def index_sampler_of(iterator: Any) -> Any:
    """What a loader's iterator takes indices from: ``_index_sampler`` (2.4 to 2.15), or None."""
    return getattr(iterator, "_index_sampler", None)


def sampler_of(iterator: Any) -> Any:
    """The sampler behind a loader's iterator, or None."""
    outer = index_sampler_of(iterator)
    return getattr(outer, "sampler", outer)


def loader_iterator_base(dataloader: Any) -> Any:
    """``_BaseDataLoaderIter``, whose ``_next_index`` asks the sampler for a batch (2.4 to 2.15).

    Without it what the ranks draw is not known.
    """
    base = getattr(dataloader, "_BaseDataLoaderIter", None)
    return base if hasattr(base, "_next_index") else None


LOADER_BUILT = "_DataLoader__initialized"
"""What ``DataLoader.__init__`` sets when its samplers are in place (2.4 to 2.15).

Without it a loader is named by the line that iterates over it, not by the one that built it.
"""


def samplers_of(iterator: Any) -> list[Any]:
    """The sampler behind a loader's iterator, and the batch sampler around it, if there are any."""
    outer = index_sampler_of(iterator)
    inner = getattr(outer, "sampler", None)
    return [each for each in (inner, outer) if each is not None]


def pass_of(iterator: Any) -> Any:
    """What changes when a loader's iterator begins again: ``_sampler_iter`` (2.4 to 2.15), or None.

    Without it the passes of persistent workers count as one.
    """
    return getattr(iterator, "_sampler_iter", None)


def is_iterable_style(iterator: Any) -> bool:
    """Whether the loader's data set is iterable-style: ``_dataset_kind`` (2.4 to 2.15)."""
    return getattr(iterator, "_dataset_kind", 0) == 1


def dataset_of(iterator: Any) -> Any:
    """The data set behind a loader's iterator: ``_dataset`` (2.4 to 2.15), or None."""
    return getattr(iterator, "_dataset", None)


def batches_at_once(iterator: Any) -> bool:
    """Whether the loader itself makes batches of samples: ``_auto_collation`` (2.4 to 2.15)."""
    return bool(getattr(iterator, "_auto_collation", True))


def keeps_order(iterator: Any) -> bool:
    """Whether batches come in the order they were drawn: ``_in_order`` (2.6 to 2.15), else yes."""
    return bool(getattr(iterator, "_in_order", True))


def workers_of(iterator: Any) -> int:
    """How many worker processes a loader's iterator has: ``_num_workers`` (2.4 to 2.15), or 0."""
    workers = getattr(iterator, "_num_workers", 0)
    return workers if isinstance(workers, int) else 0


def worker_functions_of(iterator: Any) -> list[Any]:
    """What a loader's workers call beside its data set: ``_collate_fn``, ``_worker_init_fn``.

    None where there is none (2.4 to 2.15 have them, the second only with workers).
    """
    return [getattr(iterator, name, None) for name in ("_collate_fn", "_worker_init_fn")]
