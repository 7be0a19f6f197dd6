"""A DDP job to step into; tests find its lines by the marks in comments."""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Samples(Dataset[torch.Tensor]):
    """Vectors, made by the worker that is asked for them."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index % 7))  # mark: worker


def say(line: str) -> None:
    """Print in one write: the ranks are unbuffered and share the output."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def meet(folder: Path, attempt: int) -> None:
    """Wait for the other ranks: the group's timeout may be shorter than a late import of torch."""
    (folder / f"here-{attempt}-{os.environ['RANK']}").touch()
    world_size = int(os.environ["WORLD_SIZE"])
    while not all((folder / f"here-{attempt}-{rank}").exists() for rank in range(world_size)):
        time.sleep(0.05)


def train(options: argparse.Namespace) -> None:
    """The training loop, until it is asked to end by a file."""
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Samples()
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, shuffle=False)
    context = options.context if options.workers else None
    loader = DataLoader(
        data,
        batch_size=4,
        sampler=sampler,
        num_workers=options.workers,
        multiprocessing_context=context,
    )
    total = torch.zeros(1)
    for step, batch in enumerate(loader):
        here = rank == options.rank
        optimizer.zero_grad()  # mark: loop
        if here and options.at == step:
            if options.how == "error":
                wrong = batch[0, 0].item() - 100
                raise ValueError(f"a bad value: {wrong}")  # mark: error
            if options.how == "away":
                time.sleep(options.seconds)  # mark: away
            elif options.how == "gil":
                # Native code that keeps Python's lock for as long as it takes.
                import ctypes

                ctypes.PyDLL(None).sleep(int(options.seconds))  # mark: gil
        loss = model(batch).square().mean()
        loss.backward()
        total += loss.detach()
        dist.all_reduce(total)  # mark: all_reduce
        optimizer.step()  # mark: after all_reduce
        time.sleep(options.pause)
        ended = torch.tensor([float(os.path.exists(options.stop))])
        dist.all_reduce(ended)
        if ended.item() > 0 or step + 1 == options.steps:
            break
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    timeout = backend.options._timeout.total_seconds()
    traced = sys.gettrace() is not None
    say(f"rank {rank} ended after {step + 1} steps, timeout {timeout:g}, traced {traced}")


def main() -> None:
    first = os.getpid()  # mark: first
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop", default="stop", help="the file whose appearance ends the job")
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds after each step")
    parser.add_argument("--rank", type=int, default=1, help="where something happens")
    parser.add_argument("--at", type=int, default=-1, help="the step in which it happens")
    parser.add_argument("--how", default="")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--timeout", type=float, default=60.0, help="of the process group")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context", default="fork")
    options = parser.parse_args()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if options.how == "restart" and attempt == 0:
        # Before the process group: gloo's own second start is not what this is about.
        while not os.path.exists("restart"):
            time.sleep(0.05)  # mark: first attempt
        sys.exit(f"process {first} ends its attempt")
    meet(Path(options.stop).parent, attempt)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout))
    train(options)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
