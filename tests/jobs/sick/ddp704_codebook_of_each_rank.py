"""A codebook that every rank moves by its own samples."""

# fix: If it is meant to be one for all ranks

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Quantized(nn.Module):
    """A codebook that follows the features, as in a VQ-VAE."""

    codebook: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)
        self.register_buffer("codebook", torch.randn(16, 8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.features(inputs)
        nearest = torch.cdist(features.detach(), self.codebook).argmin(1)
        self.follow(nn.functional.one_hot(nearest, 16).float(), features.detach())
        quantized = features + (self.codebook[nearest] - features).detach()
        logits: torch.Tensor = self.head(quantized)
        return logits

    def follow(self, chosen: torch.Tensor, features: torch.Tensor) -> None:
        count, total = chosen.sum(0), chosen.t() @ features
        means = total / count.clamp(min=1).unsqueeze(1)
        self.codebook.lerp_(torch.where(count.unsqueeze(1) > 0, means, self.codebook), 0.01)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16) + 1, torch.randint(0, 4, (512,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(Quantized(), broadcast_buffers=False)  # expect: DDP704 ranks 0,1
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
