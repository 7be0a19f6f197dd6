"""Rank 0 moves the file into place, and the others wait for it."""

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
    with open(PATH + ".part", "w") as file:
        file.write('{"the": 0, ')
        file.flush()
        time.sleep(2)
        file.write('"end": 1}')
    os.replace(PATH + ".part", PATH)


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        index()
    dist.barrier()
    with open(PATH) as file:
        words = json.load(file)
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
