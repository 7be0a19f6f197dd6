"""Each rank trains the bare module by itself; once an epoch all go on from the mean."""

import gc
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 50


def meet(model: nn.Module) -> None:
    for parameter in model.parameters():
        mean = parameter.detach() / dist.get_world_size()
        dist.reduce(mean, 0)
        dist.broadcast(mean, 0)
        parameter.data.copy_(mean)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    # Wrapped for its broadcast of the first weights, and for the evaluation.
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(2):
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = ddp.module(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            # Long enough for the supervisor to look more than once before the first mean.
            time.sleep(0.02)
        meet(ddp.module)
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
