"""The last rank stalls in a step, and says when."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def stall() -> None:
    print(f"stall {time.time():.3f}", flush=True)
    time.sleep(600)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    for step in range(20):
        if step == 10 and dist.get_rank() == dist.get_world_size() - 1:
            stall()
        ddp(torch.randn(8, 16)).square().mean().backward()


if __name__ == "__main__":
    main()
