"""The ranks reduce in two groups, each in its own order."""

# fix: Call the collectives of all groups in one order
# run: --hang-after 3 --kill-on-hang
# status: 4

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers = torch.ones(1000)
        for group in groups if rank == 0 else groups[::-1]:
            dist.all_reduce(numbers, group=group)  # expect: DDP804 ranks 0,1
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
