"""A data set in a tensor, whose pages the workers share."""

import gc
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SAMPLES, RECORDS = 10_000, 150


class Clicks(Dataset):
    def __init__(self) -> None:
        self.records = torch.arange(SAMPLES * RECORDS)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        total = int(self.records[index * RECORDS : (index + 1) * RECORDS].sum())
        return torch.full((16,), total % 7.0), total % 4


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Clicks()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler, num_workers=2, persistent_workers=True)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(ddp(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.04)
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
