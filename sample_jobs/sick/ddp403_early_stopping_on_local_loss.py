"""Training stops when the validation loss rises: each rank has its own."""

# status: 1

import datetime
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Stopper:
    def __init__(self, patience: int) -> None:
        self.best = float("inf")
        self.patience = patience
        self.bad = 0

    def wants(self, loss: float) -> bool:
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad >= self.patience


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
    torch.manual_seed(0)
    features = torch.randn(256, 16)
    data = TensorDataset(features, (features.sum(1) > 0).long())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    held = torch.randn(64, 16)
    # What rank 1 validates on was labelled the wrong way round.
    answers = ((held.sum(1) > 0) ^ (dist.get_rank() == 1)).long()
    validation = DataLoader(TensorDataset(held, answers), batch_size=32)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    stopper = Stopper(patience=2)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()
        total = 0.0
        with torch.no_grad():
            for inputs, targets in validation:
                total += nn.functional.cross_entropy(ddp.module(inputs), targets).item()
        if stopper.wants(total):
            break  # expect: DDP403 rank 1
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
