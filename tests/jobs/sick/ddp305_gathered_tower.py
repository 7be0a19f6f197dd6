"""all_gather loses the graph of one tower, which find_unused_parameters=True hides."""

# fix: Use torch.distributed.nn.functional.{}

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(16, 8)
        self.text = nn.Linear(16, 8)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.image(inputs), self.text(inputs)


def gathered(mine: torch.Tensor) -> torch.Tensor:
    each = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(each, mine)  # expect: DDP305 ranks 0,1
    return torch.cat(each)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(Towers(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (inputs,) in loader:
            image, text = ddp(inputs)
            target = torch.arange(len(inputs)) + dist.get_rank() * len(inputs)
            optimizer.zero_grad()
            nn.functional.cross_entropy(image @ gathered(text).t(), target).backward()
            optimizer.step()
    del ddp, optimizer, image, text
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
