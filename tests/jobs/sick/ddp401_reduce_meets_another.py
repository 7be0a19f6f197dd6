"""Rank 0 alone evaluates, and what it reduces there meets the next training loss of the others."""

# status: 1

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def is_first() -> bool:
    return dist.get_rank() == 0


def mean(value: torch.Tensor) -> torch.Tensor:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def evaluate(model: nn.Module) -> torch.Tensor:
    return mean(model(torch.randn(8, 16)).square().mean())


def validate(ddp: DistributedDataParallel) -> None:
    if not is_first():
        return
    score = evaluate(ddp.module)  # expect: DDP401 rank 0
    print(f"score {score.item():.2f}")


def main() -> None:
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(3):
        for _ in range(4):
            loss = ddp(torch.randn(32, 16)).square().mean()
            mean(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        validate(ddp)
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
