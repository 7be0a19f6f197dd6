"""Rank 0 hands its losses to a thread, and nobody tells that thread that training is over."""

# fix: Let the thread end
# run: --hang-after 2

import gc
import queue
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def report(losses: "queue.Queue[float | None]") -> None:
    worst = 0.0
    while True:
        try:
            loss = losses.get(timeout=60)  # expect: DDP815 rank 0
        except queue.Empty:
            return
        if loss is None:
            return
        worst = max(worst, loss)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    losses: queue.Queue[float | None] = queue.Queue()
    if rank == 0:
        threading.Thread(target=report, args=(losses,), name="reporter").start()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.put(loss.item())
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
