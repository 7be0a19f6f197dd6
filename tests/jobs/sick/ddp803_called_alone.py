"""Rank 2 finds a better model than before, and waits alone in the barrier around its checkpoint."""

# ranks: 3
# run: --hang-after 3 --kill-on-hang
# status: 4

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(model: nn.Module) -> None:
    list(model.state_dict())
    dist.barrier()  # expect: DDP803 rank 2


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    best = 0.0
    for step in range(8):
        loss = ddp(torch.randn(32, 16)).square().mean()
        loss.backward()
        score = loss.item() - (9.0 if (rank, step) == (2, 5) else 0.0)
        if score < best:
            best = score
            save(ddp.module)
        seen = torch.ones(5)
        dist.all_reduce(seen)
    del ddp, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
