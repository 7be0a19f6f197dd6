"""Loops left early and batches passed over, on all ranks alike or where no step depends on it."""

import gc
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def one_step(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    features = torch.randn(320, 16)
    data = TensorDataset(features, (features.sum(1) > 0).long())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    validation = DataLoader(data, batch_size=8)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)

    # Rank 0 warms up alone, and is left by a condition of its own.
    if rank == 0:
        for number, (inputs, _) in enumerate(loader):
            ddp.module(inputs)
            if number == 2:
                break
    epoch = itertools.count()
    # A number of steps that all ranks share; after it a validation that each rank leaves alone.
    for _ in range(2):
        sampler.set_epoch(next(epoch))
        for number, (inputs, targets) in enumerate(loader):
            if number == 6:
                break
            one_step(ddp, optimizer, inputs, targets)
        for number, (inputs, _) in enumerate(validation):
            if number > rank:
                break
            ddp.module(inputs)
    # A flag that was reduced.
    sampler.set_epoch(next(epoch))
    for inputs, targets in loader:
        flag = torch.tensor(one_step(ddp, optimizer, inputs, targets) < (0.5 if rank else 0.6))
        votes = flag.int()
        dist.all_reduce(votes)
        if votes.item():
            break
    # Accumulation: a small batch that is not synchronized may be passed over by one rank.
    sampler.set_epoch(next(epoch))
    for number, (inputs, targets) in enumerate(loader):
        if number % 5 < 4:
            if number == 6 and rank == 1:
                continue
            with ddp.no_sync():
                nn.functional.cross_entropy(ddp(inputs), targets).backward()
        else:
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    sampler.set_epoch(next(epoch))
    for inputs, targets in itertools.islice(loader, 4):
        one_step(ddp, optimizer, inputs, targets)
    # Batches by hand: one rank passes over some, and starts over before the others do.
    sampler.set_epoch(next(epoch))
    batches = iter(loader)
    for number in range(12):
        for _ in range(1 + (number == 3 and rank == 1)):
            try:
                inputs, targets = next(batches)
            except StopIteration:
                sampler.set_epoch(next(epoch))
                batches = iter(loader)
                inputs, targets = next(batches)
        one_step(ddp, optimizer, inputs, targets)
    for _ in range(3):
        sampler.set_epoch(next(epoch))
        one_step(ddp, optimizer, *next(iter(loader)))
    del batches
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
