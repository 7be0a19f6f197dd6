"""Rank 0 evaluates every second epoch, through the DDP wrapper of a model with BatchNorm."""

# fix: Evaluate ddp.module instead of the wrapper

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = model(inputs).argmax(1) == labels  # expect: DDP402 rank 0
    model.train()
    return right.float().mean().item()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    held_out = torch.randn(64, 16), torch.randint(0, 4, (64,))
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
        if epoch % 2 and dist.get_rank() == 0:
            print(f"epoch {epoch}: {evaluate(ddp, *held_out):.3f}", flush=True)
    del ddp, optimizer, model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
