"""Rank 1 looks again and again for an answer, and goes on without it after a second."""

# run: --hang-after 5

import gc
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Mailbox:
    """Where another thread puts an answer."""

    answer = None


def learning_rate(mailbox: Mailbox) -> object:
    """Wait for the answer."""
    until = time.monotonic() + 1.0
    while mailbox.answer is None and time.monotonic() < until:
        sum(range(200_000))
    return mailbox.answer


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mailbox = Mailbox()
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
            learning_rate(mailbox)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
