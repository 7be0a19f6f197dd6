"""Why NCCL is not tested on this machine: what would only fail, or disturb somebody else."""

from __future__ import annotations

from ddpdoctor.preflight.machine import torch_files
from ddpdoctor.preflight.machine.gpu_facts import chosen, none_here
from ddpdoctor.preflight.situation import Situation, visible_gpus
from ddpdoctor.preflight.sizes import GIB, shown

NEEDED = 3 * GIB
"""Bytes that have to be free on each GPU: a CUDA context takes half a GiB, NCCL's buffers up to one
and a half for eight GPUs, and whoever shares the GPU is to keep some."""


def why_no_nccl(situation: Situation, ranks: int, *, nodes: int = 1) -> str:
    """Why NCCL is not tested with so many ranks here, one for each GPU; empty if it can be.

    Args:
        situation: Of this machine.
        ranks: Of this machine.
        nodes: Of the job: NCCL connects no MIG instances.
    """
    torch = torch_files.torch()
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
