"""Only a loss that is finite everywhere is trained on, in a function; the model has BatchNorm."""

import datetime
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train_step(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: list[torch.Tensor]
) -> None:
    inputs, targets = batch
    loss = nn.functional.cross_entropy(ddp(inputs), targets)
    finite = torch.isfinite(loss).float()
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    if not finite.item():
        return
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
    torch.manual_seed(0)
    features = torch.randn(512, 16)
    # What is unlabelled is left out, and one batch of rank 1 has nothing else.
    labels = (features.sum(1) > 0).long()
    labels[129:193:2] = -100
    data = TensorDataset(features, labels)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    ddp = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            train_step(ddp, optimizer, batch)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
