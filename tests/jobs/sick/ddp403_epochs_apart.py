"""Rank 0 alone ends training after an epoch, by its own validation, in loops without a loader."""

# status: 1

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(4):
        for _ in range(10):
            loss = model(torch.randn(32, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = torch.tensor(0.3 * epoch * (2 - rank))
        if accuracy > 0.9:
            break  # expect: DDP403 rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
