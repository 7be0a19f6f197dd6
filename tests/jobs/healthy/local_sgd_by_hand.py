"""Local SGD without torch's averager: seven steps in no_sync(), then an average by hand."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

PERIOD = 7


def average(model: nn.Module) -> None:
    with torch.no_grad():
        flat = parameters_to_vector(model.parameters())
        dist.all_reduce(flat)
        vector_to_parameters(flat / dist.get_world_size(), model.parameters())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(1, 41):
        inputs = torch.randn(8, 16)
        optimizer.zero_grad()
        with ddp.no_sync():
            loss = ddp(inputs).square().mean()
            loss.backward()
        optimizer.step()
        if step % PERIOD == 0:
            average(ddp.module)
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
