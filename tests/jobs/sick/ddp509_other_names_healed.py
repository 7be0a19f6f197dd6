"""The names of the checkpoint are changed to those of the model."""

import gc
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    old = {"0.fc.weight": torch.randn(32, 16), "1.fc.weight": torch.randn(4, 32)}
    path = os.path.join(tempfile.gettempdir(), f"names-{os.environ['RANK']}.pt")
    torch.save(old, path)
    network = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))
    state = torch.load(path)
    state = {"0.weight": state["0.fc.weight"], "2.weight": state["1.fc.weight"]}
    network.load_state_dict(state)
    ddp = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.randn(16, 16)).square().mean().backward()
        optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
