"""All ranks update the average of the weights."""

import copy
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Average:
    """A moving average of a model's weights."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    held_out = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    shard = Subset(held_out, range(dist.get_rank(), 64, dist.get_world_size()))
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    ema = Average(ddp.module)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
            ema.update(ddp.module)
        right = torch.tensor(0)
        with torch.no_grad():
            for inputs, labels in DataLoader(shard, batch_size=16):
                right += (ema.module(inputs).argmax(1) == labels).sum()
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"accuracy {right.item() / len(held_out):.3f}")
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
