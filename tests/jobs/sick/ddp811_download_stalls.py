"""Rank 0 downloads the weights while rank 1 waits for it, and the server falls silent for long."""

# fix: Fetch data and weights before the job starts
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
    """A server that sends half of what it announced, and the rest much later."""
    connection, _ = listener.accept()
    connection.recv(4096)
    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 2000\r\n\r\n" + bytes(1000))
    time.sleep(14)
    connection.sendall(bytes(1000))
    connection.close()


def download(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return answer.read()  # expect: DDP811 rank 0


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        # Another machine, as it were.
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        os.environ["no_proxy"] = "*"
        download(f"http://127.0.0.1:{listener.getsockname()[1]}/weights")
    dist.barrier()
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
