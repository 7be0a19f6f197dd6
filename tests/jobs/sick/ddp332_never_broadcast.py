"""Gradients are averaged by hand, and each rank began with weights of its own."""

# fix: Before the first step, broadcast

import torch
import torch.distributed as dist
from torch import nn


def rollouts(rank: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    states = torch.randn(32, 16, generator=generator) + 0.1 * rank
    return states, (states.sum(1) > 0).long()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    generator = torch.Generator().manual_seed(10 + rank)
    policy = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(60):
        states, actions = rollouts(rank, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(policy(states), actions).backward()
        gradients = torch.cat([each.grad.view(-1) for each in policy.parameters()])
        dist.all_reduce(gradients)  # expect: DDP332 ranks 0,1
        start = 0
        for each in policy.parameters():
            each.grad.copy_(gradients[start : start + each.numel()].view_as(each) / world)
            start += each.numel()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
