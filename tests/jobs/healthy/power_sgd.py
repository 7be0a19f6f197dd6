"""Compress gradients by PowerSGD, whose collectives are called in more than one thread."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(60):
        batch = torch.randn(16, 64)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), batch[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
    del model, optimizer, loss, state
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
