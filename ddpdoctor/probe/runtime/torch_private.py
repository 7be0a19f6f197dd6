"""Use torch's private APIs. Each entry says which versions have it, and what is lost without it.

Every access goes through here, or through `torch_groups` for process groups, and is guarded by a
check for the feature, not for a version. Hooks use public APIs directly
(``torch.optim.optimizer.register_optimizer_step_pre_hook``, ``torch.distributed``, ``GradScaler``).
The versions are those whose sources were read, 2.13 and 2.15 among them, but not 2.14.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

# -- functions that hooks wrap

DDP_INIT_HELPER = "_ddp_init_helper"
"""Builds reducer and logger in DistributedDataParallel (2.4 to 2.15).

It runs in ``__init__``, so that warnings there still point to the user's line. Without it, how DDP
was built is not recorded, and backward is not split.
"""

PRE_FORWARD = "_pre_forward"
"""DDP method that orders buckets once (2.4 to 2.15). Without it a wait there is ``other``."""

REBUILT = "_has_rebuilt_buckets"
"""Set on a DDP module (2.4 to 2.15) once its buckets are in order, after which nothing waits."""

SYNC_BUFFERS = "_sync_buffers"
"""DDP's broadcast before forward (2.4 to 2.15). Without it a wait there is ``other``."""

VERIFY_PARAMETERS = "_verify_param_shape_across_processes"
"""Function of DDP's module (2.0 to 2.15) that its constructor calls first.

Without it only DDP's exception shows that models differ between ranks.
"""

ENGINE = "_engine_run_backward"
"""Function of ``torch.autograd`` (2.3 to 2.15) that ``backward`` and ``grad`` call.

Without it backward is ``other``.
"""

PATCH_STEP = "_patch_step_function"
"""Method that every new ``Optimizer`` calls (2.4 to 2.15).

Without it every job is assumed to have an optimizer.
"""

REDUCE_LR = "_reduce_lr"
"""Method of ``ReduceLROnPlateau`` (1.0 to 2.15) that cuts the learning rate.

It is below ``step``, so that warnings there still point to the user's line. Without it a difference
of learning rates is attributed to the optimizer's step.
"""

RESTORE_LOCATION = "_get_restore_location"
"""Function of ``torch.serialization`` (1.0 to 2.15) that each load calls once.

It turns ``map_location`` into the function that puts a storage on its device. Without it, the line
that loaded onto another rank's GPU is unknown.
"""

STAGE = "_PipelineStageBase"
"""Base of all stages of ``torch.distributed.pipelining.stage`` (2.4 to 2.15).

Without it ranks of a pipeline are compared as if they did the same work.
"""

STAGE_FORWARD = "forward_maybe_with_nosync"
"""Method of that base (2.4 to 2.15): a micro-batch's forward, which is ``other`` without it."""

INIT_OPTIMIZER = "_init_optim_state"
"""Function of ``torch.distributed.checkpoint.state_dict`` (2.2 to 2.15) that steps an optimizer.

Without it that counts as a step of the training.
"""


# -- DDP


def is_ddp(module: Any) -> bool:
    """Return whether a module is a DistributedDataParallel."""
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    return parallel is not None and isinstance(module, parallel.DistributedDataParallel)


def inside_forward(ddp_class: Any) -> Any:
    """Return ``DistributedDataParallel._inside_ddp_forward`` (2.4 to 2.15), a context manager.

    It surrounds the wrapped module's forward, and Dynamo already breaks there: a hook in it adds no
    graph break to ``torch.compile(ddp)``, where one around ``forward`` does (measured on 2.13).
    Without it forward counts as ``other`` and steps need an optimizer.
    """
    return getattr(ddp_class, "_inside_ddp_forward", None)


SAMPLE_RATE = 100  # torch's own interval of timed iterations


def sample(ddp: Any, every: int) -> None:
    """Set the interval of DDP's timed iterations: ``_set_ddp_runtime_logging_sample_rate``.

    For ranks on the CPU only. On CUDA the sampled iterations read events, so torch's own rate (the
    first ten, then every hundredth) stays. Without it only those iterations are split.
    """
    setter = getattr(ddp, "_set_ddp_runtime_logging_sample_rate", None)
    if setter is not None:
        setter(every)


def logging_ints(ddp: Any) -> dict[str, int] | None:
    """Return the numbers of DDP's logger: ``_get_ddp_logging_data`` (2.4 to 2.15), or None."""
    getter = getattr(getattr(ddp, "logger", None), "_get_ddp_logging_data", None)
    return None if getter is None else getter().ints_map


def synced_parameters(ddp: Any) -> Iterator[tuple[str, Any]]:
    """Return names and parameters that DDP keeps equal, trained or not."""
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", None) or set()
    return ((name, each) for name, each in ddp.module.named_parameters() if name not in ignored)


def reduced_parameters(ddp: Any) -> list[tuple[str, Any]]:
    """Return names and parameters that DDP reduces: those that require gradients."""
    return [(name, each) for name, each in synced_parameters(ddp) if each.requires_grad]


def frozen_parameters(ddp: Any) -> list[Any]:
    """Return parameters that require no gradient, without those that DDP ignores."""
    return [each for _, each in synced_parameters(ddp) if not each.requires_grad]


def gradient_ready_times(ddp: Any) -> list[int] | None:
    """Return when each reduced gradient was ready: ``get_backward_stats`` (1.9 to 2.15), or None.

    A time of 0 means never. A time that has not changed since the last call means not in the last
    backward. Without it, only ``p.grad is None`` shows that a parameter got no gradient.
    """
    getter = getattr(getattr(ddp, "reducer", None), "get_backward_stats", None)
    return None if getter is None else list(getter())


def used_map(ddp: Any) -> Any:
    """Return on how many ranks each parameter was used: ``_get_local_used_map`` (1.10 to 2.15).

    It is a tensor on DDP's device, summed over the ranks with ``find_unused_parameters``. None
    without it: then an unneeded flag is not found.
    """
    getter = getattr(getattr(ddp, "reducer", None), "_get_local_used_map", None)
    return None if getter is None else getter()


def scalar_factor(node: Any) -> float | None:
    """Return the factor of a node in autograd's graph, if it is one number on the CPU.

    ``_saved_other`` of ``MulBackward0`` and ``DivBackward0`` (1.9 to 2.15). None without it.
    """
    name = node.name()
    if name not in ("MulBackward0", "DivBackward0"):
        return None
    try:
        other = getattr(node, "_saved_other", None)
    except RuntimeError:
        # A backward has freed it.
        return None
    if other is None or other.device.type != "cpu" or other.numel() != 1 or other.requires_grad:
        return None
    value = float(other)
    return (1 / value if value else None) if name == "DivBackward0" else value


def joins(ddp: Any) -> bool:
    """Return whether a DDP module ever ran within ``join()``: ``_join_config`` (2.4 to 2.15).

    Without it uneven inputs are reported there, too.
    """
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def is_enabled(join: Any) -> bool:
    """Return whether a ``Join`` does anything: ``_enable`` (1.10 to 2.15). Without it, True."""
    return bool(getattr(join, "_enable", True))


def comm_hook(ddp: Any) -> str:
    """Return the name of DDP's communication hook, or "": ``_comm_hooks`` (2.2 to 2.15).

    Without it, local SGD shows only by its averaging.
    """
    hooks = getattr(ddp, "_comm_hooks", None) or [(None, None)]
    return str(getattr(hooks[-1][0], "__name__", ""))


def broadcasts_buffers(ddp: Any) -> bool | None:
    """Return whether DDP broadcasts buffers before a forward. None if a hook of the user does.

    ``buffer_hook`` and ``modules_buffers`` (1.9 to 2.15). Without them buffers are not compared.
    """
    if hasattr(ddp, "buffer_hook") or not hasattr(ddp, "modules_buffers"):
        return None
    return syncs_buffers(ddp)


def syncs_buffers(ddp: Any) -> bool:
    """Return the user's choice of ``forward_sync_buffers``, up to 2.12 ``broadcast_buffers``."""
    return bool(getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True)))


# -- autograd


def accumulator(parameter: Any) -> Any:
    """Return autograd's node that accumulates a parameter's gradient, found as DDP does.

    DDP keeps it alive by its own hooks on it. None if gradients are off: then only losses show
    which rank had the first NaN.
    """
    torch: Any = sys.modules["torch"]
    with torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    return function.next_functions[0][0] if function is not None else None


BARE_DEPTH = 5  # maximum number of nodes from a loss to the end of its graph that `is_bare` follows
_SMALL_GRAPH = 32  # maximum number of nodes of a graph that are searched for a parameter


def is_bare(tensors: Any) -> bool:
    """Return whether the first loss has no graph, or one so small that it may reach no parameter.

    ``light.h`` asks the same in light steps. ``next_functions`` lists a node's inputs.
    """
    node: Any = tensors[0].grad_fn if tensors else None
    for _ in range(BARE_DEPTH if node is not None else 0):
        edges = node.next_functions
        if not edges:
            return type(getattr(node, "variable", None)).__name__ != "Parameter"
        node = edges[0][0]
        if node is None:
            return True
    return bool(tensors) and node is None


def reaches_no_parameter(tensors: Any) -> bool:
    """Return whether the graphs of losses are small and hold no parameter of a module."""
    torch: Any = sys.modules["torch"]
    nodes: list[Any] = [each.grad_fn for each in tensors]
    if any(isinstance(each, torch.nn.Parameter) for each in tensors):
        return False
    for count, node in enumerate(nodes):
        # The list grows by the nodes that it reaches.
        if count >= _SMALL_GRAPH or isinstance(getattr(node, "variable", None), torch.nn.Parameter):
            return False
        if node is not None:
            nodes += [each for each, _ in node.next_functions if each is not None]
    return True


def compiles_autograd() -> bool:
    """Return whether compiled autograd is on, which would trace a hook on a node (2.4 on)."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(getattr(dynamo.config, "compiled_autograd", False))


def hook_again(handle: Any, hook: Any) -> bool:
    """Put back a hook that its ``RemovableHandle`` removed. Return whether that was possible.

    Finding a node of autograd again takes 80 us. False if handles have no ``hooks_dict_ref``.
    """
    reference = getattr(handle, "hooks_dict_ref", None)
    hooks: Any = None if reference is None else reference()
    if hooks is not None:
        hooks[handle.id] = hook
    return hooks is not None


def saved_tensors(node: Any) -> tuple[list[tuple[bool, Any]], bool]:
    """Return the tensors that an operation keeps for its backward, and whether these are all.

    Each comes with a flag: whether it is the operation's own result.

    ``_raw_saved_*`` and ``_saved_*`` of a node (1.9 to 2.15). If a saved tensor has an
    ``unpack_hook`` (2.13 to 2.15), unpacking would call a hook of the job, such as checkpointing's,
    so it is left out.
    """
    found = []
    complete = True
    for name in _saved_names(node.__class__):
        raw = getattr(node, name)
        many = isinstance(raw, (tuple, list))
        if any(getattr(each, "unpack_hook", raw) is not None for each in (raw if many else (raw,))):
            complete = False
            continue
        # A function of the job keeps them as ``saved_tensors``.
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


@functools.lru_cache(maxsize=256)
def _saved_names(operation: Any) -> tuple[str, ...]:
    # `dir` takes most of the time.
    return tuple(name for name in dir(operation) if name.startswith("_raw_saved_"))


def sequence_of(node: Any) -> int:
    """Return the number of a thread's operation, greater for later ones, or -1 if unknown.

    ``_sequence_nr`` of a node (2.0 to 2.15).
    """
    number = getattr(node, "_sequence_nr", None)
    return int(number()) if number is not None else -1


def factor_of(loss: Any) -> float | None:
    """Return the number by which a loss was last multiplied: ``_saved_other`` (1.9 to 2.15).

    None if another operation came last. Without it, losses of accumulated batches are averaged.
    """
    node = loss.grad_fn
    name = node.name() if node is not None else ""
    if name not in ("DivBackward0", "MulBackward0"):
        return None
    try:
        other = getattr(node, "_saved_other", None)
    except RuntimeError:
        # The number was changed in place since.
        return None
    if other is None or other.numel() != 1 or not other:
        return None
    return 1 / float(other) if name == "DivBackward0" else float(other)


# -- modules, tensors and devices


def is_sharded(optimizer: Any) -> bool:
    """Return whether an optimizer keeps another part of the state on each rank, as ZeRO does."""
    return any(each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__)


def is_batch_norm(module: Any) -> bool:
    """Return whether a module is a BatchNorm: ``_BatchNorm`` (1.0 to 2.15), or ``SyncBatchNorm``.

    Without that base class no small batch is found.
    """
    return _is_norm(module, "_BatchNorm")


def normalizes_alone(module: Any) -> bool:
    """Return whether a module is a BatchNorm that takes its statistics from one rank's batch."""
    return is_batch_norm(module) and not isinstance(module, sys.modules["torch"].nn.SyncBatchNorm)


def keeps_statistics(module: Any) -> bool:
    """Return whether a module is a BatchNorm or InstanceNorm: ``_NormBase`` (1.4 to 2.15).

    Without it only the names of buffers show that they are statistics.
    """
    return _is_norm(module, "_NormBase")


def _is_norm(module: Any, name: str) -> bool:
    base = getattr(sys.modules["torch"].nn.modules.batchnorm, name, None)
    return base is not None and isinstance(module, base)


def unsaved_buffers(module: Any) -> set[str]:
    """Return buffers outside the state dict: ``_non_persistent_buffers_set`` (1.6 on), or none."""
    return getattr(module, "_non_persistent_buffers_set", None) or set()


def is_profiling(torch: Any) -> bool:
    """Return whether a profiler is on: ``autograd._profiler_enabled`` (1.0 to 2.15).

    A second one would silently end it. Without the function, it is assumed to be on.
    """
    enabled = getattr(torch.autograd, "_profiler_enabled", None)
    return enabled is None or bool(enabled())


def stop_recording(torch: Any) -> None:
    """Let this thread record no operators: ``autograd._enable_record_function`` (1.9 to 2.15)."""
    enable = getattr(torch.autograd, "_enable_record_function", None)
    if enable is not None:
        enable(False)


def dtype_name(tensor: Any) -> str:
    """Return the name of a tensor's dtype, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def scale_of(scaler: Any) -> Any:
    """Return a GradScaler's scale, a tensor on its device: ``_scale`` (1.6 to 2.15), or None.

    ``get_scale`` would wait for a GPU. Without it scales are not compared.
    """
    return getattr(scaler, "_scale", None)


def largest(torch: Any, tensors: list[Any]) -> Any:
    """Return the greatest magnitude in each tensor, as one vector in double precision.

    ``_foreach_norm`` (1.13 to 2.15) launches few kernels for many tensors of a device and dtype.
    Without it there is one for each.
    """
    together = getattr(torch, "_foreach_norm", None)
    if together is not None:
        return torch.stack(together(tensors, math.inf)).double()
    return torch.stack([torch.linalg.vector_norm(each, ord=math.inf) for each in tensors]).double()


def device_uuid(torch: Any, device: Any) -> str:
    """Return the UUID of a CUDA device: ``get_device_properties(device).uuid`` (2.5 to 2.15).

    Empty without it, and while CUDA is not initialized: then a rank's GPUs are unknown.
    """
    if not torch.cuda.is_initialized():
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def current_stream(cuda: Any, device: Any) -> Callable[[], Any]:
    """Return a function that gets a device's current stream, without making an object each time.

    ``torch._C._cuda_getCurrentRawStream`` (1.12 to 2.15) returns the stream's address in a third of
    the time of ``torch.cuda.current_stream``, which is called for a new address, or always.
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
            # torch has 32 streams of a priority for a device.
            if len(known) >= 64:
                known.clear()
            stream = known[at] = cuda.current_stream(device)
        return stream

    return current


# -- functions


def function_mode(torch: Any) -> Any:
    """Return the innermost active ``TorchFunctionMode`` (2.1 to 2.15), or None.

    Raises:
        AttributeError: This torch has no such function. Then the calls of a loss are not followed.
    """
    return torch.overrides._get_current_function_mode()


# -- Dynamo


def skip_frames(torch: Any, modules: Iterable[ModuleType]) -> None:
    """Make Dynamo skip the functions of ``modules``, with all that they call.

    They run between the graphs of a compiled region. ``torch._C._dynamo.eval_frame`` marks code
    objects at no cost per call: ``set_code_exec_strategy`` (2.7 to 2.15), ``skip_code`` before.
    Without either, Dynamo compiles them, which only takes longer to warm up.
    """
    functions = (
        value
        for module in modules
        for owner in (module, *(v for v in vars(module).values() if isinstance(v, type)))
        for value in vars(owner).values()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    )
    _skip(torch, (each.__code__ for each in functions), within=True)


def skip_wrappers(torch: Any, codes: Iterable[CodeType]) -> None:
    """Make Dynamo skip functions that call others of the job, but not those others."""
    _skip(torch, codes, within=False)


def _skip(torch: Any, codes: Iterable[CodeType], within: bool) -> None:
    eval_frame = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    setter = getattr(eval_frame, "set_code_exec_strategy", None)
    action = getattr(eval_frame, "_FrameAction", None)
    strategy = getattr(eval_frame, "_FrameExecStrategy", None)
    older = getattr(eval_frame, "skip_code", None)
    if setter is not None and action is not None and strategy is not None:
        skip = strategy(action.SKIP, action.SKIP if within else action.DEFAULT)
        for code in codes:
            setter(code, skip)
    elif older is not None:
        for code in codes:
            older(code)


def disable_dynamo(torch: Any, function: Any, recursive: bool) -> Any:
    """Wrap in ``torch._disable_dynamo`` (2.4 to 2.15), which imports Dynamo when first called.

    Without it return the function.
    """
    disable = getattr(torch, "_disable_dynamo", None)
    return function if disable is None else disable(function, recursive=recursive)


def has_compiled() -> bool:
    """Return whether ``torch.compile`` ran here: ``torch._dynamo.utils.counters`` (2.0 to 2.15).

    Without it we do not tell users that breakpoints in such functions are not hit (debugpy#999).
    """
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    # An index would add a missing entry to the job's own counters.
    return bool((counters or {}).get("frames", {}).get("ok"))


# -- ``torch.utils.data.dataloader``


def loader_iterator_classes(dataloader: Any) -> list[Any]:
    """Return the classes with ``_next_data`` (2.4 to 2.15). Without, waits count as ``other``."""
    names = ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")
    classes = [getattr(dataloader, name, None) for name in names]
    return [each for each in classes if "_next_data" in vars(each or object)]


def loader_iterator_base(dataloader: Any) -> Any:
    """Return ``_BaseDataLoaderIter``, whose ``_next_index`` calls the sampler (2.4 to 2.15).

    Without it, the samples that ranks draw are unknown.
    """
    base = getattr(dataloader, "_BaseDataLoaderIter", None)
    return base if hasattr(base, "_next_index") else None


def fetchers(dataloader: Any) -> list[Any]:
    """Return the classes whose ``fetch`` makes a batch: ``_utils.fetch`` (2.4 to 2.15).

    Without them, workers' draws from random number generators are unknown.
    """
    module = getattr(getattr(dataloader, "_utils", None), "fetch", None)
    names = ("_MapDatasetFetcher", "_IterableDatasetFetcher")
    return [getattr(module, name) for name in names if hasattr(module, name)]


LOADER_BUILT = "_DataLoader__initialized"
"""Attribute that ``DataLoader.__init__`` sets after its samplers (2.4 to 2.15).

Without it a loader is named by the line that iterates over it, not by the one that built it.
"""


def is_first_batch(iterator: Any) -> bool:
    """Return whether a loader's iterator is still unused: ``_num_yielded`` (2.4 to 2.15).

    Without it the time between epochs is charged to the first step of the next.
    """
    return getattr(iterator, "_num_yielded", None) == 0


def index_sampler_of(iterator: Any) -> Any:
    """Return the source of the indices of a loader's iterator: ``_index_sampler`` (2.4 to 2.15)."""
    return getattr(iterator, "_index_sampler", None)


def sampler_of(iterator: Any) -> Any:
    """Return the sampler behind a loader's iterator, or None."""
    outer = index_sampler_of(iterator)
    return getattr(outer, "sampler", outer)


def samplers_of(iterator: Any) -> list[Any]:
    """Return the sampler behind a loader's iterator, and the batch sampler, if there are any."""
    outer = index_sampler_of(iterator)
    inner = getattr(outer, "sampler", None)
    return [each for each in (inner, outer) if each is not None]


def pass_of(iterator: Any) -> Any:
    """Return an object that differs in each pass: ``_sampler_iter`` (2.4 to 2.15), or None.

    Without it the passes of persistent workers count as one.
    """
    return getattr(iterator, "_sampler_iter", None)


def is_iterable_style(iterator: Any) -> bool:
    """Return whether the loader's data set is iterable-style: ``_dataset_kind`` (2.4 to 2.15)."""
    return getattr(iterator, "_dataset_kind", 0) == 1


def dataset_of(iterator: Any) -> Any:
    """Return the data set behind a loader's iterator: ``_dataset`` (2.4 to 2.15), or None."""
    return getattr(iterator, "_dataset", None)


def batches_at_once(iterator: Any) -> bool:
    """Return whether the loader collates samples itself: ``_auto_collation`` (2.4 to 2.15)."""
    return bool(getattr(iterator, "_auto_collation", True))


def keeps_order(iterator: Any) -> bool:
    """Return whether batches come in the order drawn: ``_in_order`` (2.6 to 2.15), or True."""
    return bool(getattr(iterator, "_in_order", True))


def workers_of(iterator: Any) -> int:
    """Return the number of a loader's worker processes: ``_num_workers`` (2.4 to 2.15), or 0."""
    workers = getattr(iterator, "_num_workers", 0)
    return workers if isinstance(workers, int) else 0


def keeps_workers(iterator: Any) -> bool:
    """Return whether workers live on after a pass: ``_persistent_workers`` (2.4 to 2.15)."""
    return bool(workers_of(iterator) and getattr(iterator, "_persistent_workers", False))


def worker_functions_of(iterator: Any) -> list[Any]:
    """Return the functions that workers call besides the data set, or None for a missing one.

    ``_collate_fn`` and ``_worker_init_fn`` (2.4 to 2.15), the second only with workers.
    """
    return [getattr(iterator, name, None) for name in ("_collate_fn", "_worker_init_fn")]
