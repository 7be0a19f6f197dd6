"""Both ranks accept a folder that is there."""

import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER = os.path.join(tempfile.gettempdir(), "vocabulary")


def index() -> dict[str, int]:
    """Write the words of the corpus."""
    os.makedirs(FOLDER, exist_ok=True)
    words = {"the": 0, "end": 1}
    with open(os.path.join(FOLDER, f"{dist.get_rank()}.json"), "w") as file:
        json.dump(words, file)
    return words


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(1)  # it reads more of its configuration
    words = index()
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
