"""The process that the script started is ended and joined."""

# run: --hang-after 5

import gc
import multiprocessing
import multiprocessing.queues

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def upload(queue: "multiprocessing.queues.Queue[float | None]") -> None:
    while queue.get(timeout=60) is not None:
        pass


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.queues.Queue[float | None] = context.Queue()
    if dist.get_rank() == 0:
        process = context.Process(target=upload, args=(queue,))
        process.start()
    for _ in range(8):
        optimizer.zero_grad()
        loss = ddp(torch.randn(16, 16)).square().mean()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            queue.put(loss.item())
    if dist.get_rank() == 0:
        queue.put(None)
        process.join()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
