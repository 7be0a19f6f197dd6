"""Penalties are kept with the graph of their step."""

# fix: Keep numbers:

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 150


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    history = []
    for _ in range(STEPS):
        inputs, labels = torch.randn(512, 256), torch.randint(0, 10, (512,))
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(ddp.module(inputs).square().mean())  # expect: DDP620
    print(float(sum(history)) / STEPS)
    del model, ddp, optimizer, loss, history
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
