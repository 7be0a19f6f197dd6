"""A rank's windows begin in the shard of the rank before it."""

import gc
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Windows(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, series: torch.Tensor, begin: int, end: int) -> None:
        self.series = series
        self.begin, self.end = begin, end

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker else (0, 1)
        for start in range(self.begin + number, self.end, of):
            window = self.series[start : start + 16]
            yield window, (window.sum() > 0).long()


def main() -> None:
    dist.init_process_group("gloo")
    series = torch.randn(432, generator=torch.Generator().manual_seed(0))
    each = 384 // dist.get_world_size()
    begin = 32 + dist.get_rank() * each
    windows = Windows(series, begin - 32, begin + each)
    loader = DataLoader(windows, batch_size=16, num_workers=2)  # expect: DDP117 ranks 0,1

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
