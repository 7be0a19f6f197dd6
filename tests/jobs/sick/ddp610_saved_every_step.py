"""Rank 0 saves the model after every step, and waits until it is on the disk."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(model: nn.Module, path: str) -> None:
    with open(path, "wb") as file:
        torch.save(model.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(65_536, 32), nn.Linear(32, 1))
    network[0].requires_grad_(False)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network[1].parameters(), lr=0.01)
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(100):
            loss = model(torch.randint(65_536, (64,))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                save(network, os.path.join(directory, "model.pt"))  # expect: DDP610 rank 0
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
