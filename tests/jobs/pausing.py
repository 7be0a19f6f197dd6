"""A DDP job with a ``breakpoint()`` in it, on one rank; tests find its lines by the marks."""

from __future__ import annotations

import datetime
import gc
import sys

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
    rank = dist.get_rank()
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 1:
        breakpoint()  # mark: breakpoint
        total += 1  # mark: after breakpoint
        breakpoint()
        total += 1  # mark: after second
    dist.all_reduce(total)
    sys.stdout.write(f"rank {rank} has {total.item():g}\n")
    sys.stdout.flush()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
