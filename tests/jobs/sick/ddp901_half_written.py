"""Rank 1 reads a file as soon as it is there, and rank 0 is still writing it."""

# fix: Let one rank prepare it and the others wait
# status: 1

import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER = os.path.join(tempfile.gettempdir(), "vocabulary")
PATH = os.path.join(FOLDER, "vocabulary.json")


def index() -> None:
    """Write the words of the corpus, which takes a while."""
    os.makedirs(FOLDER, exist_ok=True)
    with open(PATH, "w") as file:
        file.write('{"the": 0, ')
        file.flush()
        time.sleep(2)
        file.write('"end": 1}')


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        index()
    while not os.path.exists(PATH):
        time.sleep(0.1)
    with open(PATH) as file:
        words = json.load(file)  # expect: DDP901 rank 1
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
