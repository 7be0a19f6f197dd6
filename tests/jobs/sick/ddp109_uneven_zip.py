"""Rank 1's part of the data is shorter, and a zip of two loaders ends there before a limit does."""

# status: 1

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

LIMIT = 50


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    inputs, targets = torch.randn(72, 16), torch.randn(72, 4)
    rows = range(40) if rank == 0 else range(40, 72)
    loader = DataLoader(Subset(TensorDataset(inputs), rows), batch_size=4)  # expect: DDP109 rank 1
    other = DataLoader(Subset(TensorDataset(targets), rows), batch_size=4)  # or: DDP109 rank 1
    pairs = zip(loader, other, strict=False)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    total = torch.zeros(1)
    for (batch,), (wanted,) in pairs:  # or: DDP109 rank 1
        if total >= LIMIT:
            break
        loss = (ddp(batch) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += 1
    dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
