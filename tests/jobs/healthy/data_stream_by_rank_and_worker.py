"""A stream of which each worker of each rank reads its own part, on three ranks."""

# ranks: 3

import gc
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info is not None else (1, 0)
        generator = torch.Generator().manual_seed(self.epoch)
        for number in range(576):
            sample = torch.randn(16, generator=generator)
            if number % (self.world * workers) == self.rank * workers + worker:
                yield sample, (sample.sum() > 0).long()


def main() -> None:
    dist.init_process_group("gloo")
    dataset = Lines(dist.get_rank(), dist.get_world_size())
    loader = DataLoader(dataset, batch_size=16, num_workers=2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        dataset.epoch = epoch
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
