"""Training on measurements, of which some are missing (NaN)."""

# fix: Look at this rank's {}

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    measured = torch.randn(96, 16)
    measured[7, 3] = float("nan")
    data = TensorDataset(measured, torch.randint(0, 4, (96,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        loss.backward()  # expect: DDP706 rank 1
        optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
