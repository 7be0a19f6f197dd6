"""Early stopping on the largest loss of all ranks ends a loop without a loader."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    best = float("inf")
    for step in range(60):
        loss = model(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        validation = loss.detach() + (step if rank == 1 else -step)
        dist.all_reduce(validation, op=dist.ReduceOp.MAX)
        if step > 20 and validation > best:
            break
        best = validation.item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
