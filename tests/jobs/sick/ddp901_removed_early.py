"""Rank 0 removes the cache that rank 1 is about to read."""

# fix: Let one rank remove or move it
# status: 1

import json
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER = os.path.join(tempfile.gettempdir(), "vocabulary")
PATH = os.path.join(FOLDER, "vocabulary.json")


def index() -> None:
    """Write the words of the corpus."""
    os.makedirs(FOLDER, exist_ok=True)
    with open(PATH, "w") as file:
        json.dump({"the": 0, "end": 1}, file)


def read() -> dict[str, int]:
    with open(PATH) as file:  # expect: DDP901 rank 1
        words: dict[str, int] = json.load(file)
    return words


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        index()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1)  # it builds something else first
    words = read()
    if dist.get_rank() == 0:
        shutil.rmtree(FOLDER)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.EmbeddingBag(len(words), 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.randint(0, len(words), (8, 4))).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
