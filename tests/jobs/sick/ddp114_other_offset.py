"""Each rank skips another number of prices before the sampler divides them."""

# fix: Build the same data set on every rank

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Prices(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Predict a price from those before it."""

    def __init__(self, prices: torch.Tensor) -> None:
        self.windows = prices.unfold(0, 9, 1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.windows[index, :8], self.windows[index, 8:]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    prices = torch.randn(264).cumsum(0) / 16
    data = Prices(prices[dist.get_rank() :])
    sampler: DistributedSampler[object] = DistributedSampler(data)  # expect: DDP114 ranks 0,1
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for window, target in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(window), target).backward()
            optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
