"""A small DDP job on GPUs whose memory grows in the way that its first argument names.

Ranks share a GPU where there are more of them than GPUs, as in ``on_gpu.py``.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 512
STEPS = 400
HISTORY: list[torch.Tensor] = []
MASKS: dict[Any, torch.Tensor] = {}


class Net(nn.Module):
    """Layers that may keep what they saw."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
        self.keeps = keeps
        self.seen: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.keeps:
            self.seen.append(inputs.detach() + 1)  # guilty: module
        found: torch.Tensor = self.body(inputs)
        return found


def mask(key: Any, device: torch.device) -> torch.Tensor:
    if key not in MASKS:
        MASKS[key] = torch.ones(1024, 1024, device=device)  # guilty: cache
    return MASKS[key]


def watch(layer: nn.Module, device: torch.device) -> None:
    kept = torch.zeros(1024, 1024, device=device)
    layer.register_forward_hook(lambda *_: None if kept.numel() else kept)  # guilty: hooks


def leak(device: torch.device) -> None:
    """Lose a tensor, as an extension does that forgets to release a reference."""
    lost = torch.zeros(1024, 1024, device=device)  # guilty: library
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(lost))


def main() -> None:
    kind = sys.argv[1]
    gpus, local = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus:
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_IB_DISABLE"] = "1"
    device = torch.device("cuda", local % gpus)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    ddp = DistributedDataParallel(Net(kind == "module").to(device))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    replay: deque[torch.Tensor] = deque(maxlen=150)
    total: Any = 0.0
    if kind == "offset" and local:
        time.sleep(0.012)
    for step in range(100_000 if kind == "full" else STEPS):
        rows = 256 + 16 * step if kind == "batches" else 2048
        inputs = torch.randn(rows, WIDTH, device=device)
        if kind == "replay":
            replay.append(inputs)
            inputs = replay[int(torch.randint(len(replay), ()))]
        if kind == "hooks":
            watch(ddp.module.body[0], device)
        if kind == "library":
            leak(device)
        loss: torch.Tensor = ddp(inputs).pow(2).mean()
        if kind == "cache":
            loss = loss * mask(step, device)[0, 0]
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if kind == "graphs":
            HISTORY.append(ddp.module(inputs).sum())  # guilty: graphs
        if kind == "total":
            total = total + ddp.module(inputs).pow(2).mean()  # guilty: total
        if kind == "full" and local == 1:
            HISTORY.append(torch.empty(1 << 30, dtype=torch.uint8, device=device))  # guilty: full
        time.sleep(0.02)
    print(f"{torch.cuda.max_memory_allocated(device) >> 20} MiB", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
