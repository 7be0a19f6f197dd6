"""A data set that holds its table as an array, read by worker processes."""

import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROWS = 3_000_000
STEPS = 1600


class Table(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self) -> None:
        self.rows = np.array([f"image-{row:09d}.jpg" for row in range(ROWS)], dtype=np.bytes_)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.rows[index], index % 10
        return torch.full((8,), float(len(path))), label


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    table = Table()
    sampler = DistributedSampler(table)
    loader = DataLoader(table, batch_size=20, sampler=sampler, num_workers=1)
    ddp = DistributedDataParallel(nn.Linear(8, 10))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for step, (inputs, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.015)  # a larger model
        if step == STEPS:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
