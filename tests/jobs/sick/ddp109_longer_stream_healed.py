"""Both ranks take as many files as the one that has fewer."""

import gc
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def batches() -> Iterator[torch.Tensor]:
    for _ in range(20):
        yield torch.randn(16, 16)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for batch in batches():
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
