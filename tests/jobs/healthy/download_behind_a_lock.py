"""One rank downloads over a narrow line while the other waits for its lock, as libraries do it."""

# run: --hang-after 2

import fcntl
import gc
import os
import socket
import tempfile
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
    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 20000\r\n\r\n")
    for _ in range(200):
        time.sleep(0.03)
        connection.sendall(bytes(100))
    connection.close()


def download() -> bytes:
    listener = socket.create_server(("127.0.0.1", 0))
    # Another machine, as it were.
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    os.environ["no_proxy"] = "*"
    with urllib.request.urlopen(f"http://127.0.0.1:{listener.getsockname()[1]}/data") as answer:
        return answer.read()


def fetched_once() -> None:
    """Whoever is first downloads; who comes later finds it done."""
    done = os.path.join(tempfile.gettempdir(), f"data-{os.getppid()}")
    with open(f"{done}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(done):
            data = download()
            with open(done, "wb") as file:
                file.write(data)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    fetched_once()
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
