"""Rank 0 alone evaluates the model after each short epoch, and the others wait."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def evaluate(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    total = 0.0
    with torch.no_grad():
        for inputs, targets in DataLoader(data, batch_size=64):
            total += nn.functional.cross_entropy(model(inputs), targets).item()
            time.sleep(0.1)  # a slow metric
    model.train()
    return total


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(640, 64), torch.randint(0, 10, (640,)))
    held_out = TensorDataset(torch.randn(256, 64), torch.randint(0, 10, (256,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(24):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            evaluate(model.module, held_out)  # expect: DDP610 rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
