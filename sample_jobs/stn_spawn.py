"""Train a spatial transformer network; the ranks are started by ``torch.multiprocessing.spawn``.

No launcher is needed: ``python stn_spawn.py`` starts ``--ranks`` processes, and each runs
:func:`work` with its rank as the first argument. Under ``torchrun`` the processes are there
already, and each is one rank. The network first turns the digit upright, then classifies it. A
model without BatchNorm has no buffers to keep in step, so DDP gets ``broadcast_buffers=False``
(from torch 2.13 on, ``forward_sync_buffers=False``).

``--straight-epochs N`` trains the first N epochs without turning. The layers that find the angle
then get no gradient, for which DDP waits unless it is given ``--find-unused-parameters``.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from job_setup import (
    InputError,
    add_backend,
    check_backend,
    non_negative_int,
    pick_backend,
    pick_device,
    positive_float,
    positive_int,
)
from mnist_digits import Digits, draw_digits, read_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

MAX_ANGLE = 60.0
"""How far the drawn digits are turned, in degrees."""


def parse_args() -> argparse.Namespace:
    """Return the checked options."""
    parser = argparse.ArgumentParser(
        description="Train a spatial transformer network on processes that the script spawns."
    )
    parser.add_argument(
        "--ranks", type=positive_int, help="processes to start (default: one per GPU, else 2)"
    )
    parser.add_argument(
        "--port", type=positive_int, help="where they meet on 127.0.0.1 (default: a free one)"
    )
    add_backend(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", help="the four idx files of MNIST")
    parser.add_argument("--train-size", type=positive_int, help="drawn digits (default: 2000)")
    parser.add_argument("--test-size", type=positive_int, help="drawn digits (default: 500)")
    parser.add_argument("--epochs", type=positive_int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--straight-epochs",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="train the first N epochs without the transformer (default: %(default)s)",
    )
    parser.add_argument(
        "--find-unused-parameters",
        action="store_true",
        help="let DDP look for parameters that get no gradient, in every step",
    )
    parser.add_argument(
        "--batch-size", type=positive_int, default=64, help="digits per rank (default: %(default)s)"
    )
    parser.add_argument("--lr", type=positive_float, default=0.003, help="default: %(default)s")
    parser.add_argument("--seed", type=non_negative_int, default=0, help="default: %(default)s")
    args = parser.parse_args()

    check_backend(parser, args.backend)
    if args.straight_epochs and not args.find_unused_parameters:
        parser.error("--straight-epochs leaves parameters unused: add --find-unused-parameters")
    if "RANK" in os.environ and (args.ranks or args.port):
        parser.error("--ranks and --port are for a start without a launcher")
    if args.data is not None:
        if args.train_size or args.test_size:
            parser.error("--train-size and --test-size apply to drawn digits, not to --data")
        try:
            # Every rank reads the files itself; this shows early whether it can.
            read_digits(args.data, "train")
            read_digits(args.data, "t10k")
        except InputError as error:
            parser.error(str(error))
    return args


class SpatialTransformer(nn.Module):
    """Finds an affine transform for each image, applies it, and classifies the result.

    Maps images ``[batch, 1, 28, 28]`` to logits ``[batch, 10]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.localization = nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=7),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(8, 10, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(90, 32),
            nn.ReLU(),
        )
        self.transform = nn.Linear(32, 6)
        # At first every image stays as it is.
        nn.init.zeros_(self.transform.weight)
        self.transform.bias.data.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
        self.classifier = nn.Sequential(
            nn.Conv2d(1, 10, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(10, 20, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(320, 50),
            nn.ReLU(),
            nn.Linear(50, 10),
        )

    def forward(self, images: Tensor, straight: bool = False) -> Tensor:
        """Return the logits; ``straight`` leaves the transformer out."""
        if not straight:
            matrices = self.transform(self.localization(images)).view(-1, 2, 3)
            grid = functional.affine_grid(matrices, list(images.shape), align_corners=False)
            images = functional.grid_sample(images, grid, align_corners=False)
        logits: Tensor = self.classifier(images)
        return logits


def load_data(args: argparse.Namespace) -> tuple[Digits, Digits]:
    """Return the training and the test set."""
    if args.data is not None:
        return read_digits(args.data, "train"), read_digits(args.data, "t10k")
    return (
        draw_digits(args.train_size or 2000, args.seed, MAX_ANGLE),
        draw_digits(args.test_size or 500, args.seed + 1, MAX_ANGLE),
    )


@torch.no_grad()
def accuracy(module: nn.Module, test_set: Digits, rank: int, size: int) -> float:
    """Return the share of the test set that is classified correctly; every image counts once."""
    device = next(module.parameters()).device
    module.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    mine = Subset(test_set, range(rank, len(test_set), size))
    for images, labels in DataLoader(mine, batch_size=256):
        correct += (module(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
    dist.all_reduce(correct)
    return correct.item() / len(test_set)


def train(args: argparse.Namespace, rank: int, size: int, device: torch.device) -> None:
    """Train; rank 0 prints a line per epoch and a summary."""
    train_set, test_set = load_data(args)
    torch.manual_seed(args.seed)
    module = SpatialTransformer().to(device)
    known = inspect.signature(DistributedDataParallel).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    model: nn.Module = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        find_unused_parameters=args.find_unused_parameters,
        **{option: False},  # type: ignore[arg-type]
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, size, rank, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    criterion = nn.CrossEntropyLoss()
    share = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        straight = epoch < args.straight_epochs
        loss_sum = torch.zeros((), device=device)
        for images, labels in loader:
            logits = model(images.to(device), straight)
            loss = criterion(logits, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        share = accuracy(module, test_set, rank, size)
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}{' straight' if straight else ''} "
                f"loss {loss_sum.item() / len(loader) / size:.4f} test accuracy {share:.4f}",
                flush=True,
            )
    if rank == 0:
        print(f"summary: ranks {size}, {args.epochs} epochs, test accuracy {share:.4f}", flush=True)


def work(rank: int, size: int, init_method: str, args: argparse.Namespace) -> None:
    """Run one rank; ``spawn`` passes the rank, and the rest as it was given."""
    device = pick_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = args.backend or pick_backend(int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size)
    train(args, rank, size, device)
    # What is left of DDP goes before the process group does.
    gc.collect()
    dist.destroy_process_group()


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    """Start the ranks, or be one."""
    args = parse_args()
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", args)
        return
    ranks = args.ranks or torch.cuda.device_count() or 2
    init_method = f"tcp://127.0.0.1:{args.port or free_port()}"
    mp.spawn(  # type: ignore[attr-defined,no-untyped-call]
        work, args=(ranks, init_method, args), nprocs=ranks
    )


if __name__ == "__main__":
    # A spawned process imports this file; without the guard each would spawn more.
    main()
