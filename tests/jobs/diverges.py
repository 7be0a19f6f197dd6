"""Rank 1 changes a parameter; the job goes on until the ranks have told how far they are apart."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.randn(4, 8)
    journal = Path(os.environ["DDPDOCTOR_RUN_DIR"], f"rank-{dist.get_rank():04d}.r0.jsonl")
    until = time.monotonic() + 60
    done = torch.zeros(1)
    step = 0
    while not done:
        optimizer.zero_grad()
        loss = ddp(batch).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        if step == 40 and dist.get_rank() == 1:
            ddp.module[1].bias.data[2] += 0.25
        if step % 100 == 0:
            told = '"kind":"elements"' in journal.read_text() or time.monotonic() > until
            done.fill_(float(told))
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
