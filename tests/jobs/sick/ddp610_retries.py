"""The labels of rank 1 come from a service that is slow to answer, and it sleeps between tries."""

# fix: Take the pause out of the training loop

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Service:
    """Answers the first rank at once, and others when asked often enough."""

    def __init__(self, rank: int) -> None:
        self.patience = 4 * rank
        self.asked = 0

    def ask(self, count: int) -> torch.Tensor | None:
        self.asked += 1
        return None if self.asked % (self.patience + 1) else torch.ones(count, 1)


def fetch(service: Service, count: int) -> torch.Tensor:
    while (labels := service.ask(count)) is None:
        time.sleep(0.01)  # expect: DDP610 rank 1
    return labels


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    service = Service(rank)
    for _ in range(100):
        labels = fetch(service, 64)
        loss = (model(torch.randn(64, 64)) - labels).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
