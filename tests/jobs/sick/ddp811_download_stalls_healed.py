"""Rank 0 downloads the weights, slowly but steadily, before the ranks meet."""

# run: --hang-after 2

import gc
import os
import socket
import threading
import time
import urllib.request

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def serve(listener: socket.socket) -> None:
    """A server at the end of a narrow line."""
    connection, _ = listener.accept()
    connection.recv(4096)
    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 2000\r\n\r\n" + bytes(1000))
    for _ in range(10):
        time.sleep(0.1)
        connection.sendall(bytes(100))
    connection.close()


def download(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return answer.read()


def main() -> None:
    if os.environ["RANK"] == "0":
        listener = socket.create_server(("127.0.0.1", 0))
        # Another machine, as it were.
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        os.environ["no_proxy"] = "*"
        download(f"http://127.0.0.1:{listener.getsockname()[1]}/weights")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
