"""The batch is divided among the ranks, and BatchNorm has its statistics from the parts."""

# parity: 1,2
# fix: On GPUs, SyncBatchNorm

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(320, 16, generator=made)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32 // world, sampler=sampler)
    torch.manual_seed(rank)
    layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    model = DistributedDataParallel(layers)  # expect: DDP309
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
