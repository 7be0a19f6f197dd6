"""Rank 1 stops in pdb, at which nobody is."""

# fix: Take it out, or use `breakpoint()`
# run: --hang-after 3 --kill-on-hang
# status: 4

import gc
import os
import pdb
import sys
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def look(loss: torch.Tensor, terminal: TextIO) -> None:
    """Stop in the debugger, as `pdb.set_trace()` does at a terminal."""
    pdb.Pdb(stdin=terminal, stdout=sys.stdout).set_trace()
    print(loss)  # expect: DDP808 rank 1


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    terminal, _keyboard = os.pipe()
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
            look(loss, os.fdopen(terminal))
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
