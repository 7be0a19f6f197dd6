"""Gradients averaged without DDP: a rank has fewer batches, and ends before the other."""

# fix: Give all ranks the same number of steps
# status: 1

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    states = torch.randn(8 * (30 - 2 * rank), 16)
    for batch in states.split(8):  # expect: DDP801 rank 1
        loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        flat = torch.cat([each.flatten() for each in gradients])
        dist.all_reduce(flat)
        flat /= world
        parts = flat.split([each.numel() for each in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
