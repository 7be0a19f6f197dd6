"""A thread of rank 1 holds a lock while it packs a summary, and the loop waits for it."""

# fix: Find the process or thread that holds the lock

import os
import threading
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Metrics:
    """Numbers that a thread summarizes from time to time, under a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: list[float] = []
        self.over = threading.Event()

    def add(self, value: float) -> None:
        with self.lock:  # expect: DDP610 rank 1
            self.values.append(value)

    def summarize(self) -> None:
        summary = os.urandom(1 << 22)
        while not self.over.is_set():
            with self.lock:
                zlib.compress(summary)
            self.over.wait(0.0002)


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    metrics = Metrics()
    thread = threading.Thread(target=metrics.summarize)
    if rank == 1:
        thread.start()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(120):
        loss = model(torch.randn(64, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics.add(loss.item())
    metrics.over.set()
    if rank == 1:
        thread.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
