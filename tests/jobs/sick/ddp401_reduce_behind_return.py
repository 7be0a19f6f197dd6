"""What is logged is reduced behind a return of all ranks but the first."""

# fix: Call it on every rank of the group: in front of the `{}`
# run: --hang-after 3 --kill-on-hang
# status: 4

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def log(rank: int, loss: torch.Tensor) -> None:
    if rank != 0:
        return
    mean = loss.detach().clone()
    dist.all_reduce(mean)  # expect: DDP401 rank 0
    print(f"{mean.item():.2f}")


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(rank, loss)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
