"""The averaged weights decay by the same factor for each sample."""

# parity: 1,2

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
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world)
    averaged = [each.detach().clone() for each in model.parameters()]
    decay = 0.99**world
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            for average, each in zip(averaged, model.parameters(), strict=True):
                average.mul_(decay).add_(each.detach(), alpha=1 - decay)
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
