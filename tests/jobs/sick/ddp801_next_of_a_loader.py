"""Each rank takes as many batches as it has files, by next(), and rank 0 has fewer."""

# fix: Give all ranks the same number of steps
# status: 1

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    files = 20 + 4 * rank
    batches = iter(DataLoader(TensorDataset(torch.randn(400, 16)), batch_size=8))
    for _ in range(files):  # expect: DDP801 rank 0
        (batch,) = next(batches)
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
