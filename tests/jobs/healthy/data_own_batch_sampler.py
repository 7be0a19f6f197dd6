"""A batch sampler of its own, whose epoch goes by another name, and workers that stay."""

import gc
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Buckets(Sampler[list[int]]):
    """Batches of neighbours, in an order of their own in each round, every rank its part."""

    def __init__(self, length: int, size: int) -> None:
        self.length, self.size, self.round = length, size, 0

    def start(self, number: int) -> None:
        self.round = number

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(
            self.length // self.size, generator=torch.Generator().manual_seed(self.round)
        )
        for bucket in order[dist.get_rank() :: dist.get_world_size()].tolist():
            yield list(range(bucket * self.size, bucket * self.size + self.size))

    def __len__(self) -> int:
        return self.length // self.size // dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(320, 16, generator=generator)
    dataset = TensorDataset(features, (features.sum(1) > 0).long())
    batches = Buckets(len(dataset), 16)
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=2, persistent_workers=True)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        batches.start(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
