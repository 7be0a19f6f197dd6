"""A batch without boxes has a loss of zero that hangs on the output."""

# run: --hang-after 5

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(20):
        boxes = torch.randn(0 if (step, rank) == (7, 1) else 8, 16)
        output = ddp(boxes)
        optimizer.zero_grad()
        loss = output.square().mean()
        if not len(boxes):
            loss = output.sum() * 0
        loss.backward()
        optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
