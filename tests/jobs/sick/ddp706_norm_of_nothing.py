"""A distance in the loss: for two equal rows its root has an infinite slope."""

# fix: Look for roots, norms and divisions at zero

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.head = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = self.encoder(inputs)
        return self.head(codes), (codes[0] - codes[1]).square().sum().sqrt()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    features = torch.randn(96, 16)
    # One sample is there twice.
    features[15] = features[13]
    data = TensorDataset(features, torch.randint(0, 4, (96,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    ddp = DistributedDataParallel(Spread())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for inputs, labels in loader:
        optimizer.zero_grad()
        outputs, distance = ddp(inputs)
        loss = nn.functional.cross_entropy(outputs, labels) - 0.01 * distance
        loss.backward()  # expect: DDP706 rank 1
        optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
