"""The twin: a sample that is too short is made longer."""

# run: --hang-after 3 --kill-on-hang

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[torch.Tensor]):
    """Random vectors, of which some were cut short."""

    def __init__(self, cut: int) -> None:
        self.cut = cut

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        length = 8 if index >= self.cut else 16
        while length < 16:
            length += 1
        return torch.randn(length)[:16]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    data = Samples(40 if rank == 1 else 64)
    shard = range(rank, 64, 2)
    for batch in DataLoader(data, batch_size=4, sampler=shard):
        loss = ddp(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
