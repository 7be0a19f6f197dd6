"""Each rank draws as many samples as the data set has."""

# parity: 1,2
# fix: Give the loader a DistributedSampler

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(320, 16, generator=made)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    weights = WeightedRandomSampler([1.0] * len(data), len(data))
    loader = DataLoader(data, batch_size=8, sampler=weights)  # expect: DDP340
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world)
    for _ in range(3):
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
