"""Train the small convolutional MNIST network on several hosts, each rank started by hand.

There is no launcher: whoever starts a rank says where the ranks meet, which one it is and how many
there are. On the first host and on the second::

    python mnist_tcp.py --init-method tcp://10.0.0.1:22225 --rank 0 --world-size 2
    python mnist_tcp.py --init-method tcp://10.0.0.1:22225 --rank 1 --world-size 2

Under ``torchrun`` the options can be left out, since it sets RANK and WORLD_SIZE and the default
``env://`` reads them; without either, the job is a single process. Rank 0 prints the time of every
epoch, so that runs on 1, 2 and 3 hosts can be compared: the data set is divided among the ranks,
but each step has to move all gradients over the network, however many hosts there are.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from job_setup import (
    InputError,
    World,
    add_backend,
    check_backend,
    non_negative_int,
    pick_backend,
    pick_device,
    positive_float,
    positive_int,
)
from mnist_digits import Digits, draw_digits, read_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler


def parse_args() -> tuple[argparse.Namespace, Digits, Digits]:
    """Return the checked options, the training set and the test set."""
    parser = argparse.ArgumentParser(
        description="Train the small MNIST network on ranks that are started by hand."
    )
    parser.add_argument(
        "--init-method",
        default="env://",
        metavar="URL",
        help="where the ranks meet, tcp://HOST:PORT of rank 0 (default: MASTER_ADDR, MASTER_PORT)",
    )
    parser.add_argument("--rank", type=non_negative_int, help="default: $RANK")
    parser.add_argument("--world-size", type=positive_int, help="default: $WORLD_SIZE")
    add_backend(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", help="the four idx files of MNIST")
    parser.add_argument("--train-size", type=positive_int, help="drawn digits (default: 6000)")
    parser.add_argument("--test-size", type=positive_int, help="drawn digits (default: 1000)")
    parser.add_argument("--epochs", type=positive_int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--batch-size", type=positive_int, default=64, help="digits per rank (default: %(default)s)"
    )
    parser.add_argument("--lr", type=positive_float, default=0.05, help="default: %(default)s")
    parser.add_argument("--seed", type=non_negative_int, default=0, help="default: %(default)s")
    args = parser.parse_args()

    if args.rank is None and "RANK" in os.environ:
        args.rank = int(os.environ["RANK"])
    if args.world_size is None and "WORLD_SIZE" in os.environ:
        args.world_size = int(os.environ["WORLD_SIZE"])
    if (args.rank is None) != (args.world_size is None):
        parser.error("--rank and --world-size belong together")
    if args.rank is None and args.init_method != "env://":
        parser.error("--init-method needs --rank and --world-size")
    if args.rank is not None and args.rank >= args.world_size:
        parser.error(f"--rank {args.rank}: the ranks of {args.world_size} are numbered from 0")
    if args.init_method == "env://" and args.rank is not None and "MASTER_ADDR" not in os.environ:
        parser.error("--rank needs --init-method tcp://HOST:PORT, the same on every rank")
    check_backend(parser, args.backend)
    if args.data is None:
        train_set = draw_digits(args.train_size or 6000, args.seed)
        return args, train_set, draw_digits(args.test_size or 1000, args.seed + 1)
    if args.train_size or args.test_size:
        parser.error("--train-size and --test-size apply to drawn digits, not to --data")
    try:
        return args, read_digits(args.data, "train"), read_digits(args.data, "t10k")
    except InputError as error:
        parser.error(str(error))


def mnist_network() -> nn.Sequential:
    """Return the network: images ``[batch, 1, 28, 28]`` to logits ``[batch, 10]``."""
    return nn.Sequential(
        nn.Conv2d(1, 10, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, kernel_size=5),
        nn.Dropout2d(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(50, 10),
    )


def join(args: argparse.Namespace) -> World:
    """Join the process group that the options name, if any."""
    # Without a launcher nothing sets LOCAL_RANK: ranks on one host then take its GPUs in turn.
    device = pick_device(int(os.environ.get("LOCAL_RANK", args.rank or 0)))
    if args.rank is None:
        return World(rank=0, size=1, device=device, backend="none")
    # Nor LOCAL_WORLD_SIZE: ranks that meet on loopback are all on one host, others one per host.
    loopback = urlsplit(args.init_method).hostname in ("127.0.0.1", "localhost")
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", args.world_size if loopback else 1)
    backend = args.backend or pick_backend(int(local_ranks))
    dist.init_process_group(
        backend, init_method=args.init_method, rank=args.rank, world_size=args.world_size
    )
    return World(args.rank, args.world_size, device, backend)


@torch.no_grad()
def accuracy(module: nn.Module, test_set: Digits, world: World) -> float:
    """Return the share of the test set that is classified correctly; every image counts once."""
    module.eval()
    mine = Subset(test_set, range(world.rank, len(test_set), world.size))
    correct = torch.zeros((), dtype=torch.int64, device=world.device)
    for images, labels in DataLoader(mine, batch_size=256):
        predicted = module(images.to(world.device)).argmax(dim=1)
        correct += (predicted == labels.to(world.device)).sum()
    if dist.is_initialized():
        dist.all_reduce(correct)
    return correct.item() / len(test_set)


def train(args: argparse.Namespace, train_set: Digits, test_set: Digits, world: World) -> None:
    """Train; rank 0 prints a line per epoch and a summary."""
    torch.manual_seed(args.seed)
    module = mnist_network().to(world.device)
    model: nn.Module = DistributedDataParallel(module) if dist.is_initialized() else module
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
    criterion = nn.CrossEntropyLoss()
    sampler: DistributedSampler[Any] = DistributedSampler(
        train_set, world.size, world.rank, seed=args.seed
    )
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    if world.rank == 0:
        print(
            f"MNIST: ranks {world.size}, device {world.device}, backend {world.backend}, "
            f"{len(train_set)} digits for training, {len(loader)} steps of {args.batch_size} per "
            "rank and epoch",
            flush=True,
        )

    times: list[float] = []
    share = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        started = time.perf_counter()
        loss_sum = torch.zeros((), device=world.device)
        for images, labels in loader:
            loss = criterion(model(images.to(world.device)), labels.to(world.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        mean_loss = loss_sum / len(loader)
        if dist.is_initialized():
            dist.all_reduce(mean_loss)
            mean_loss /= world.size
        # The value is there once the device has done all of the epoch's work.
        loss_value = mean_loss.item()
        times.append(time.perf_counter() - started)
        share = accuracy(module, test_set, world)
        if world.rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs} time {times[-1]:.2f} s loss {loss_value:.4f} "
                f"test accuracy {share:.4f}",
                flush=True,
            )
    if world.rank == 0:
        rate = len(train_set) * args.epochs / sum(times)
        print(
            f"summary: ranks {world.size}, {args.epochs} epochs in {sum(times):.2f} s, "
            f"{rate:.0f} digits/s, test accuracy {share:.4f}",
            flush=True,
        )


def main() -> None:
    """Run one rank."""
    args, train_set, test_set = parse_args()
    world = join(args)
    train(args, train_set, test_set, world)
    if dist.is_initialized():
        # What is left of DDP goes before the process group does.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
