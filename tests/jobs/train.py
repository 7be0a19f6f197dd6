"""A small DDP job that tests steer by options; healthy without any."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Samples(Dataset[tuple[torch.Tensor]]):
    """Random vectors, each ``delay`` seconds late."""

    def __init__(self, count: int, delay: float) -> None:
        self.vectors = torch.randn(count, 32, generator=torch.Generator().manual_seed(0))
        self.delay = delay

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        if self.delay:
            time.sleep(self.delay)
        return (self.vectors[index],)


def say(line: str) -> None:
    """Print in one write: torchrun's ranks are unbuffered and share the output."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def fail(how: str) -> None:
    """End this rank in one of the ways ranks end."""
    if how == "exception":
        raise ValueError("the wrong sort of batch")  # guilty: exception
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segv":
        ctypes.string_at(0)  # guilty: segv
    if how == "os-exit":
        os._exit(7)  # guilty: os-exit
    if how == "sys-exit":
        sys.exit(4)  # guilty: sys-exit
    if how == "stuck":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)


def train(options: argparse.Namespace) -> None:
    """The training loop."""
    rank = dist.get_rank()
    here = rank == options.rank
    torch.manual_seed(1)
    first = nn.Linear(32, 64)
    model = nn.Sequential(first, nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    ddp = DistributedDataParallel(model)
    if options.slow_backward and here:
        first.weight.register_hook(  # type: ignore[no-untyped-call]
            lambda grad: time.sleep(options.slow_backward)
        )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    slow = options.slow_data_rank in (-1, rank)
    count = 16 * options.steps * dist.get_world_size()
    data = Samples(count, options.slow_data if slow else 0.0)
    sampler: DistributedSampler[tuple[torch.Tensor]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=options.workers)
    step = 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            if here and options.fail and step == options.at:
                if options.fail == "leave":
                    return  # guilty: leave
                fail(options.fail)
            time.sleep(options.pause)
            optimizer.zero_grad()
            loss = ddp(batch).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and options.print_losses:
                say(f"{loss.item()!r}")
    if options.print_losses:
        say(f"rng {rank} {hash(tuple(torch.get_rng_state().tolist()))}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10, help="steps per epoch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--slow-data", type=float, default=0.0, help="seconds per sample")
    parser.add_argument("--slow-data-rank", type=int, default=-1, help="-1: all ranks")
    parser.add_argument("--slow-backward", type=float, default=0.0, help="seconds, on one rank")
    parser.add_argument("--rank", type=int, default=1, help="the rank that the faults hit")
    parser.add_argument("--fail", default="")
    parser.add_argument("--at", type=int, default=3, help="the step in which to fail")
    parser.add_argument("--print-losses", action="store_true")
    parser.add_argument("--init", default="env://")
    parser.add_argument("--world-size", type=int, default=-1)
    parser.add_argument("--my-rank", type=int, default=-1)
    options = parser.parse_args()
    dist.init_process_group(
        "gloo", init_method=options.init, rank=options.my_rank, world_size=options.world_size
    )
    try:
        train(options)
    except (ValueError, SystemExit) as error:
        if dist.get_world_size() == 1:
            # At exit, gloo's threads abort now and then where a traceback still holds the model.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            dist.destroy_process_group()
        raise
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
