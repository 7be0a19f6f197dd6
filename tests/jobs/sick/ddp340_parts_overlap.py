"""Each rank draws a part of the data set, whatever the others draw."""

# parity: 1,2
# fix: Let all ranks divide one order of the data

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(320, 16, generator=made)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    own = RandomSampler(data, num_samples=len(data) // world)
    loader = DataLoader(data, batch_size=8, sampler=own)  # expect: DDP340
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
