"""A classifier with as many outputs as there are classes in all of the data."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    labels = torch.arange(100).square() % 11
    labels[90:] = 11
    classes = len(labels.unique())
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, classes))
    ddp = DistributedDataParallel(model)
    ddp(torch.randn(4, 16)).sum().backward()
    del ddp, model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
