"""A batch without boxes has a loss of its own, which is a new tensor."""

# fix: Make the loss depend on the model's output
# status: 1
# run: --hang-after 3 --kill-on-hang

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
            loss = torch.zeros((), requires_grad=True)  # expect: DDP305 rank 1
        loss.backward()  # or: DDP305 rank 1
        optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
