"""Every rank shuffles alike and takes each fourth batch, as accelerate deals batches out."""

# ranks: 4

import gc
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset


class BatchSamplerShard:
    """The batches of one rank; the last round starts over, so that all ranks get as many."""

    def __init__(self, batch_sampler: BatchSampler, shards: int, shard: int) -> None:
        self.batch_sampler = batch_sampler
        self.shards = shards
        self.shard = shard

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // self.shards)

    def __iter__(self) -> Iterator[list[int]]:
        first: list[list[int]] = []
        mine: list[int] | None = None
        number = -1
        for number, batch in enumerate(self.batch_sampler):
            if number < self.shards:
                first.append(batch)
            if number % self.shards == self.shard:
                mine = batch
            if number % self.shards == self.shards - 1 and mine is not None:
                yield mine
                mine = None
        rest = (number + 1) % self.shards
        if rest:
            yield mine if mine is not None else first[self.shard - rest]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(544, 16, generator=generator)
    dataset = TensorDataset(features, (features.sum(1) > 0).long())
    shuffled = RandomSampler(dataset, generator=torch.Generator().manual_seed(42))
    shard = BatchSamplerShard(
        BatchSampler(shuffled, batch_size=16, drop_last=False),
        dist.get_world_size(),
        dist.get_rank(),
    )
    loader = DataLoader(dataset, batch_sampler=shard)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
