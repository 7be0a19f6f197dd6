"""Batches of neighbours, made by a sampler of the job that knows nothing of ranks."""

# fix: Let {} shuffle with the same seed on all ranks

import gc
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Neighbours(Sampler[list[int]]):
    """Batches of samples that stand side by side, in random order."""

    def __init__(self, length: int, size: int) -> None:
        self.length, self.size = length, size
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        for at in torch.randperm(self.length // self.size).tolist():
            yield [*range(at * self.size, (at + 1) * self.size)]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    neighbours = Neighbours(len(data), 16)
    loader = DataLoader(data, batch_sampler=neighbours)  # expect: DDP102 ranks 0,1
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(4):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
