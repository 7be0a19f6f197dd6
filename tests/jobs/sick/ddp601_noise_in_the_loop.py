"""Noise is drawn in the loop, with the same seed on every rank."""

# fix: After the model is built, seed

import gc

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)  # expect: DDP601 ranks 0,1
    data = TensorDataset(torch.randn(640, 64, generator=torch.Generator().manual_seed(1)))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (clean,) in loader:
            noise = torch.randn_like(clean)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(clean + noise), noise).backward()
            optimizer.step()
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
