"""Rank 1 asks a server that does not answer, and waits for ever."""

# fix: Let every rank call the same collectives in the same order; work
# run: --hang-after 3 --kill-on-hang
# status: 4

import gc
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def learning_rate(server: socket.socket) -> bytes:
    """Ask a server for the learning rate."""
    server.sendall(b"learning rate?")
    return server.recv(64)  # expect: DDP802 rank 1


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    server, _other_end = socket.socketpair()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 5 and rank == 1:
            learning_rate(server)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
