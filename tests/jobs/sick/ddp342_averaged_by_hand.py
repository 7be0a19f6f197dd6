"""Each rank clips its own gradients in a job without DDP, and averages them afterwards."""

# fix: Clip after the gradients were averaged

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    for _ in range(40):
        states = torch.randn(8, 16)
        loss = (model(states).squeeze(1) - states.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # expect: DDP342 ranks 0,1
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        flat = torch.cat([each.flatten() for each in gradients])
        dist.all_reduce(flat)
        flat /= world
        for gradient, part in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
