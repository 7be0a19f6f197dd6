"""Every worker of every rank has a seed of its own."""

import gc
import random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows that are cut at random."""

    def __init__(self) -> None:
        self.rows = torch.randn(480, 40, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = random.randrange(8)
        row = self.rows[index]
        return row[start : start + 32], (row.sum() > 0).long()


def seed_worker(worker_id: int) -> None:
    random.seed((torch.initial_seed() + 1000 * dist.get_rank()) % 2**32)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    data = Rows()
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
