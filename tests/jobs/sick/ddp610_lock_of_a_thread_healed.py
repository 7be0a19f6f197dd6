"""The thread takes the lock for a copy alone, and packs its summary without it."""

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
        with self.lock:
            self.values.append(value)

    def summarize(self) -> None:
        summary = os.urandom(1 << 8)
        while not self.over.is_set():
            with self.lock:
                values = len(self.values)
            zlib.compress(summary[:values])
            self.over.wait(0.002)


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
