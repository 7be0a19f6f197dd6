"""Shards of unequal length within ``join()``."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shards = torch.randn(46, 8, 16).split([21, 25])
    batches = shards[dist.get_rank()]
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join():
        for inputs in batches:
            optimizer.zero_grad()
            loss = ddp(inputs).square().mean()
            loss.backward()
            optimizer.step()
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
