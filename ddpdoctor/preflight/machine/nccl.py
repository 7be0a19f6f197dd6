"""NCCL: why it is not tested on this machine, and what to do about its errors."""

from __future__ import annotations

from ddpdoctor.preflight.machine import versions
from ddpdoctor.preflight.machine.gpu_facts import chosen, none_here
from ddpdoctor.preflight.situation import Situation, visible_gpus
from ddpdoctor.preflight.words import GIB, shown

NEEDED = 3 * GIB
"""Bytes that have to be free on each GPU: a CUDA context takes half a GiB, NCCL's buffers up to one
and a half for eight GPUs, and other users of the GPU need some."""


def why_no_nccl(situation: Situation, ranks: int, *, nodes: int = 1) -> str:
    """Why NCCL is not tested with so many ranks here, one for each GPU; empty if it can be.

    Args:
        situation: Of this machine.
        ranks: Of this machine.
        nodes: Of the job: NCCL connects no MIG instances.
    """
    torch = versions.installed_torch()
    gpus = situation.shared(visible_gpus)
    if not gpus:
        return none_here(situation) or "CUDA sees no GPU"
    if torch is None or not torch.cuda:
        return "torch without CUDA"
    if gpus < ranks:
        return f"{gpus} GPU{'s' if gpus != 1 else ''} for {ranks} ranks"
    for gpu in chosen(situation)[:ranks]:
        name = f"GPU {gpu.device.index}"
        if gpu.device.mig:
            if nodes > 1:
                return f"{name} is partitioned (MIG)"
            continue
        if gpu.closed:
            return f"the compute mode of {name} keeps others out"
        if gpu.memory_total is None or gpu.memory_used is None:
            continue
        free = gpu.memory_total - gpu.memory_used
        if free < NEEDED:
            return f"{name} has {shown(free)} free, less than the {shown(NEEDED)} it takes"
    return ""


_ADVICE = (
    (
        ("shared memory", "/dev/shm", "No space left on device", "SIGBUS"),
        "NCCL connects the ranks of a machine by /dev/shm, which is too small or full; a container "
        "needs --shm-size or --ipc=host.",
        "df -h /dev/shm; ls -lS /dev/shm | head",
    ),
    (
        ("system not yet initialized", "system not initialized", "NotReady"),
        "The NVSwitch fabric is not ready: its manager has to run, in the driver's version.",
        "sudo systemctl restart nvidia-fabricmanager",
    ),
    (
        ("no kernel image is available",),
        "This torch is not built for this GPU: install one that is.",
        "python -c 'import torch; print(torch.cuda.get_device_capability(), "
        "torch.cuda.get_arch_list())'",
    ),
    (
        ("out of memory", "busy or unavailable"),
        "Another process has the GPU, or most of its memory.",
        "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv",
    ),
    (
        ("invalid device ordinal", "No CUDA GPUs are available", "no CUDA-capable device"),
        "CUDA sees fewer GPUs than the driver: check CUDA_VISIBLE_DEVICES, MIG and the driver.",
        "python -c 'import torch; print(torch.cuda.device_count())'; nvidia-smi -L",
    ),
    (
        ("driver on your system is too old", "driver version is insufficient"),
        "Install a torch for the driver's CUDA, or a newer driver.",
        "nvidia-smi --query-gpu=driver_version --format=csv",
    ),
    (
        ("uncorrectable ECC", "unspecified launch failure", "illegal memory access"),
        "The GPU itself may be broken; see the driver's log.",
        "sudo dmesg -T | grep -i xid",
    ),
    (
        ("have NCCL built in",),
        "Install a torch that has NCCL, or let the job use gloo.",
        "python -c 'import torch.distributed as d; print(d.is_nccl_available())'",
    ),
)
"""Words of which one is in the error, what to do, and a line for that."""


def advice(error: str, otherwise: tuple[str, str]) -> tuple[str, str]:
    """What to do about an error, and a line that can be pasted.

    Args:
        error: All that is known of it.
        otherwise: The same for errors of which nothing is known here.
    """
    for words, fix, paste in _ADVICE:
        if any(word in error for word in words):
            return fix, paste
    return otherwise
