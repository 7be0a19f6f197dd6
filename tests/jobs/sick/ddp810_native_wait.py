"""An extension waits for a lock in native code and keeps the GIL."""

# fix: The extension that is called there has to release the GIL
# run: --hang-after 3 --kill-on-hang
# status: 4

import ctypes
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(64)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 5 and rank == 1:
            lock(mutex)
            lock(mutex)  # expect: DDP810 rank 1
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
