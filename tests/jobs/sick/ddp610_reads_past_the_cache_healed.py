"""All ranks read what they need of a large file for each batch."""

import mmap
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZE = 1 << 25


def load(file: int, buffer: mmap.mmap) -> torch.Tensor:
    os.preadv(file, [buffer], 0)
    return torch.frombuffer(buffer, dtype=torch.uint8)[: 64 * 64].reshape(64, 64).float()


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with tempfile.NamedTemporaryFile(dir=".") as file:
        file.write(os.urandom(SIZE))
        file.flush()
        os.fsync(file.fileno())
        opened = os.open(file.name, os.O_RDONLY)
        buffer = mmap.mmap(-1, 1 << 14)
        for _ in range(600):
            batch = load(opened, buffer)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        os.close(opened)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
