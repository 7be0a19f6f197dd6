"""A worker is forked while a thread of rank 1 holds the lock that the data set takes."""

# fix: A worker waits for a lock
# run: --hang-after 3 --kill-on-hang
# status: 4

import gc
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[torch.Tensor]):
    """Random vectors; a client for them is locked while it is used."""

    def __init__(self) -> None:
        self.client = threading.Lock()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.client:
            return torch.randn(16)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = Samples()
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
            if rank == 1:
                data.client.acquire()  # as a thread that is just using the client does
            for _ in DataLoader(data, batch_size=16, num_workers=1):  # expect: DDP809 rank 1
                pass
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
