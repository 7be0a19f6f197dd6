"""Rank 1 ends its epoch early, and at once its metric meets a gradient, which aborts the job."""

# status: 1

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(96, 16)
    inputs[25] = float("nan")
    data = TensorDataset(inputs, torch.randn(96, 4))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    noise = TensorDataset(torch.randn(96, 16))
    other: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(noise, shuffle=False)
    pairs = zip(loader, DataLoader(noise, batch_size=4, sampler=other), strict=True)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    total = torch.zeros(1)
    for (batch, targets), (added,) in pairs:
        loss = (ddp(batch + 0.1 * added) - targets).square().mean()
        if torch.isnan(loss):
            break  # expect: DDP403 rank 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
