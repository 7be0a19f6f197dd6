"""Rank 1 asks a server for every batch's weights, and the answers take their time."""

# fix: Fetch ahead of time

import os
import socket
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def serve(listener: socket.socket, delay: float) -> None:
    connection, _ = listener.accept()
    with connection:
        while connection.recv(1):
            time.sleep(delay)
            connection.sendall(b"1")


def ask(connection: socket.socket) -> float:
    connection.sendall(b"?")
    return float(connection.recv(1))  # expect: DDP610 rank 1


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    listener = socket.create_server(("127.0.0.1", 0))
    delay = 0.06 if rank == 1 else 0.0
    threading.Thread(target=serve, args=(listener, delay), daemon=True).start()
    connection = socket.create_connection(listener.getsockname())
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(300):
        weight = ask(connection)
        loss = model(torch.randn(64, 64)).square().mean() * weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    connection.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
