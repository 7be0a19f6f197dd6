"""All ranks end training after the same epoch, by the mean of their validations."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(4):
        for _ in range(10):
            loss = model(torch.randn(32, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = torch.tensor(0.3 * epoch * (2 - rank))
        dist.all_reduce(accuracy)
        accuracy /= dist.get_world_size()
        if accuracy > 0.9:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
