"""Accumulated gradients: all ranks leave a pass where one of them met a broken row."""

import contextlib
import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 16), torch.randint(0, 4, (96,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    # The third batch of rank 0 has a row that no sensor wrote.
    data.tensors[0][2 * 16] = 0.0
    total = torch.zeros(())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            broken = (~inputs.any(dim=1)).any().float()
            dist.all_reduce(broken)
            if broken > 0:
                break
            last = step % 2 == 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = nn.functional.cross_entropy(ddp(inputs), targets) / 2
                loss.backward()
            total += loss.detach()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
