"""Batches with a large loss are not learned from: each rank compares its own."""

# fix: Reduce the value over the ranks before the comparison, so that

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    features = torch.randn(96, 16)
    # An outlier, which comes to rank 1.
    features[31] *= 30
    data = TensorDataset(features, torch.randint(0, 4, (96,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        loss.backward()
        if loss.item() < 3.0:  # expect: DDP403 rank 1
            optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
