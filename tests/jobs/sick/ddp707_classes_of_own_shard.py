"""A classifier with as many outputs as there are classes in this rank's half of the data."""

# fix: Build the model from the same configuration
# status: 1

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    labels = torch.arange(100).square() % 11
    labels[90:] = 11
    classes = len(labels[dist.get_rank() :: 20].unique())
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, classes))
    ddp = DistributedDataParallel(model)  # expect: DDP707
    ddp(torch.randn(4, 16)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
