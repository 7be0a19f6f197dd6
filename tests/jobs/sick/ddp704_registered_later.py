"""Features are centred by a running mean, which is registered when the first batch has come."""

# fix: Register it before DistributedDataParallel

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(16, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.features(inputs).relu()
        mean = features.detach().mean(0)
        if "centre" not in self._buffers:
            self.register_buffer("centre", mean)
        self.centre = 0.9 * self.centre + 0.1 * mean
        logits: torch.Tensor = self.head(features - self.centre)
        return logits


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16) + 1, torch.randint(0, 4, (512,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(Centred())  # expect: DDP704 ranks 0,1
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
