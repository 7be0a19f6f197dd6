"""A process that the script started waits for more work."""

# fix: Let the processes that the script started end
# run: --hang-after 3

import gc
import multiprocessing
import multiprocessing.queues

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def upload(queue: "multiprocessing.queues.Queue[float]") -> None:
    while True:
        queue.get(timeout=60)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.queues.Queue[float] = context.Queue()
    if dist.get_rank() == 0:
        context.Process(target=upload, args=(queue,)).start()
    for _ in range(8):
        optimizer.zero_grad()
        loss = ddp(torch.randn(16, 16)).square().mean()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            queue.put(loss.item())
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # expect: DDP815 rank 0
