"""The weights of two losses are parameters of the module that DDP wraps."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Weighted(nn.Module):
    """A classifier with two losses and their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.net(inputs)
        losses = torch.stack([nn.functional.cross_entropy(logits, labels), logits.square().mean()])
        return (torch.exp(-self.weights) * losses + self.weights).sum()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(Weighted())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = ddp(inputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
