"""Each worker iterates over all that is its rank's."""

# fix: Give each worker its part

import gc
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples made one after the other, the same for everybody who asks."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for number in range(320):
            features = torch.randn(16, generator=generator)
            if number % self.world == self.rank:
                yield features, (features.sum() > 0).long()


def main() -> None:
    dist.init_process_group("gloo")
    stream = Stream(dist.get_rank(), dist.get_world_size())
    loader = DataLoader(stream, batch_size=16, num_workers=2)  # expect: DDP116 ranks 0,1

    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
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
