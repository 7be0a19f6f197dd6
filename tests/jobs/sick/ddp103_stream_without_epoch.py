"""A stream that shuffles by its epoch is never given one."""

# fix: Call set_epoch(epoch) of the data set

import gc
import random
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class ShuffledRows(IterableDataset[Tensor]):
    """Rows in another order in each epoch, dealt out to ranks and workers."""

    def __init__(self) -> None:
        self.rows = torch.randn(640, 32, generator=torch.Generator().manual_seed(1))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = list(range(len(self.rows)))
        random.Random(self.epoch).shuffle(order)
        for index in order[self.rank * workers + worker :: self.world * workers]:
            yield self.rows[index]


def main() -> None:
    dist.init_process_group("gloo")
    data = ShuffledRows()
    loader = DataLoader(data, batch_size=16, num_workers=2)  # expect: DDP103 ranks 0,1
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for rows in loader:
            optimizer.zero_grad()
            (model(rows)[:, 0] - rows.sum(1)).square().mean().backward()
            optimizer.step()
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
