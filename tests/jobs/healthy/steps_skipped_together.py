"""Losses that are NaN on one rank, in steps that all ranks skip by the norm of the gradients."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    measured = torch.randn(320, 16)
    measured[[81, 195], 3] = float("nan")
    data = TensorDataset(measured, torch.randint(0, 4, (320,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        loss.backward()
        # After the all-reduce it is the same on every rank.
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
    assert all(parameter.isfinite().all() for parameter in ddp.parameters())
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
