"""Somebody stops the worker of rank 1's DataLoader."""

# fix: Continue it: `kill -CONT {}`
# run: --hang-after 3 --kill-on-hang
# status: 4

import gc
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[torch.Tensor]):
    """Random vectors."""

    def __init__(self, stops: bool) -> None:
        self.stops = stops

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.stops and index == 32:
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.randn(16)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = Samples(stops=rank == 1)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 5:
            for _ in DataLoader(data, batch_size=16, num_workers=1):  # expect: DDP809 rank 1
                pass
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
