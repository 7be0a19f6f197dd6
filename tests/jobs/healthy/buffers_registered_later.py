"""Buffers that come after DDP: a mask, a position table, and a state of each rank's own samples."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(16, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if "mask" not in self._buffers:
            self.register_buffer("mask", torch.ones(32).cumsum(0) / 32)
            self.register_buffer("scales", torch.linspace(0, 1, 32), persistent=False)
            self.register_buffer("state", torch.zeros(16, 32))
        features = self.features(inputs) * self.mask + self.scales + self.state
        self.state = 0.5 * features.detach().tanh()
        logits: torch.Tensor = self.head(features)
        return logits


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16) + 1, torch.randint(0, 4, (512,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(Attending())
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
