"""A rank passes over damaged batches of its own, and all ranks make as many steps none the less."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

STEPS = 24


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    features = torch.randn(320, 16)
    features[77] = float("nan")
    data = TensorDataset(features, (features.nan_to_num().sum(1) > 0).long())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    steps = epoch = 0
    while steps < STEPS:
        sampler.set_epoch(epoch)
        epoch += 1
        for inputs, targets in loader:
            if inputs.isnan().any():
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()
            steps += 1
            if steps >= STEPS:
                break
    # Shards of different length, whose small last batch is left out: ten each.
    features.nan_to_num_()
    mine = Subset(data, range(80) if rank == 0 else range(160, 245))
    for _ in range(2):
        for inputs, targets in DataLoader(mine, batch_size=8, shuffle=True):
            if len(inputs) < 8:
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
