"""Train a small CNN on CIFAR-10, or on generated images of the same shape.

The job is an ordinary training script: it shuffles in every epoch, writes checkpoints, resumes
from them and tests after every epoch. It runs under any launcher that sets ``RANK``,
``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` (``ddpdoctor run`` and
``torchrun`` do), or alone, as a single process without a process group.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from cifar_files import CLASSES, IMAGE_SHAPE, Images, read_cifar10
from job_setup import (
    InputError,
    World,
    add_backend,
    check_backend,
    join_world,
    leave_world,
    non_negative_int,
    one_line,
    positive_float,
    positive_int,
    write_checkpoint,
)
from models import small_cnn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

BAR_CELLS = 30
BAR_INTERVAL_S = 0.2

Result = TypeVar("Result")


def as_it_is(batch: object) -> object:
    """Collate function for a data set whose ``__getitems__`` already returns a batch."""
    return batch


def generate(train_size: int, test_size: int, seed: int) -> tuple[Images, Images]:
    """Return a training and a test set of ten noisy patterns that a small network can learn.

    Each class has a pattern of 4x4 coloured squares; an image is its class's pattern, faint,
    under strong noise.
    """
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn((CLASSES, 3, 4, 4), generator=generator)
    patterns = patterns.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)

    def draw(count: int) -> Images:
        labels = torch.randint(0, CLASSES, (count,), generator=generator)
        pixels = torch.randn((count, *IMAGE_SHAPE), generator=generator).mul_(50.0)
        pixels.add_(patterns[labels], alpha=8.0).add_(128.0).clamp_(0.0, 255.0)
        return Images(pixels.to(torch.uint8), labels)

    return draw(train_size), draw(test_size)


def parse_args() -> argparse.Namespace:
    """Return the checked options."""
    parser = argparse.ArgumentParser(
        description="Train a small CNN on CIFAR-10, or on generated images of the same shape.",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="the folder cifar-10-batches-py or the one around it (default: generated images)",
    )
    parser.add_argument(
        "--train-size", type=positive_int, help="generated training images (default: 4096)"
    )
    parser.add_argument(
        "--test-size", type=positive_int, help="generated test images (default: 1000)"
    )
    parser.add_argument("--epochs", type=positive_int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--batch-size", type=positive_int, default=64, help="images per rank (default: %(default)s)"
    )
    parser.add_argument("--lr", type=positive_float, default=0.05, help="default: %(default)s")
    parser.add_argument("--seed", type=non_negative_int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--workers",
        type=non_negative_int,
        default=0,
        help="loader processes per rank (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="write the state here after every epoch"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the state in the --checkpoint file"
    )
    add_backend(parser)
    args = parser.parse_args()

    if args.data is not None and (args.train_size or args.test_size):
        parser.error("--train-size and --test-size apply to generated images, not to --data")
    args.train_size = args.train_size or 4096
    args.test_size = args.test_size or 1000
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    check_backend(parser, args.backend)
    return args


def on_every_rank(world: World, action: Callable[[], Result]) -> Result:
    """Return what ``action`` returns here if no rank fails; else end every rank with status 2.

    Every rank must call this. The lowest rank with an InputError prints it, so that there is one
    line whether a file is missing on all machines or on one.
    """
    problem: InputError | None = None
    try:
        result = action()
    except InputError as error:
        problem = error
    failed = torch.tensor(world.size if problem is None else world.rank, device=world.device)
    if dist.is_initialized():
        dist.all_reduce(failed, op=dist.ReduceOp.MIN)
    if failed.item() == world.size:
        return result
    if failed.item() == world.rank:
        print(f"cifar10.py: error: {problem}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        # A launcher may kill the other ranks as soon as one has ended: the line comes first.
        dist.barrier()
    leave_world()
    raise SystemExit(2)


def load_data(args: argparse.Namespace) -> tuple[Images, Images]:
    """Return the training and the test set that the options ask for."""
    if args.data is None:
        return generate(args.train_size, args.test_size, args.seed)
    return read_cifar10(args.data)


def load_checkpoint(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> int:
    """Restore ``module`` and ``optimizer`` from ``path``; return the number of epochs done."""
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["epoch"])
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or one_line(error)}; run without --resume to start over"
        ) from error
    except Exception as error:
        # Damaged bytes can make the reader raise nearly anything.
        raise InputError(
            f"{path}: damaged, or no checkpoint of this job ({one_line(error)}); remove the file "
            "and run without --resume to start over"
        ) from error


def start_epoch(
    args: argparse.Namespace, world: World, module: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Check the checkpoint options, resume if wanted, and return the number of epochs done."""
    if args.checkpoint is not None and world.rank == 0 and not args.checkpoint.parent.is_dir():
        raise InputError(f"{args.checkpoint}: its folder does not exist; create it first")
    if args.resume:
        return load_checkpoint(args.checkpoint, module, optimizer, world.device)
    return 0


class ProgressBar:
    """Plain-text progress of one epoch on stderr.

    A terminal gets a bar that redraws itself; a file or pipe gets one line when the epoch is done.
    """

    def __init__(self, title: str, steps: int, *, shown: bool) -> None:
        self.title = title
        self.steps = steps
        self.shown = shown
        self.redraws = sys.stderr.isatty()
        self.started = time.perf_counter()
        self.drawn = -math.inf

    def update(self, done: int) -> None:
        """Show that ``done`` of the steps are done."""
        if not self.shown:
            return
        now = time.perf_counter()
        complete = done == self.steps
        if not complete and (not self.redraws or now - self.drawn < BAR_INTERVAL_S):
            return
        self.drawn = now
        cells = BAR_CELLS * done // self.steps
        print(
            f"{self.title} [{'#' * cells:.<{BAR_CELLS}}] {done}/{self.steps} steps "
            f"{now - self.started:.1f} s",
            file=sys.stderr,
            flush=True,
            end="\n" if complete else "\r",
        )


def to_inputs(pixels: Tensor, device: torch.device) -> Tensor:
    """Return uint8 images as floats from -1 to 1 on ``device``, in the same shape."""
    return pixels.to(device, non_blocking=True).float().div_(127.5).sub_(1.0)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[Tensor, Tensor]],
    device: torch.device,
    bar: ProgressBar,
) -> float:
    """Train for one epoch; return the mean loss per image over all ranks."""
    criterion = nn.CrossEntropyLoss()
    model.train()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    images = torch.zeros((), dtype=torch.float64, device=device)
    pixels: Tensor
    labels: Tensor
    for step, (pixels, labels) in enumerate(loader, start=1):
        loss = criterion(model(to_inputs(pixels, device)), labels.to(device, non_blocking=True))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        # Kept on the device: asking for the value in every step would stall a GPU.
        loss_sum += loss.detach() * len(labels)
        images += len(labels)
        bar.update(step)
    if dist.is_initialized():
        dist.all_reduce(loss_sum)
        dist.all_reduce(images)
    return float(loss_sum / images)


@torch.no_grad()
def evaluate(module: nn.Module, test_set: Images, world: World, batch_size: int) -> tuple[int, int]:
    """Return how many test images were classified correctly and how many there were.

    Rank r of n takes the images r, r + n, r + 2n and so on: every image counts exactly once,
    whatever the number of ranks. Ranks may have different numbers of batches, so this must use
    the bare ``module``; the DDP wrapper could wait for a batch that another rank does not have.
    """
    if dist.is_initialized():
        # Between two training steps each rank has different BatchNorm statistics; rank 0's are
        # those that the checkpoint gets.
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
    module.eval()
    correct = torch.zeros((), dtype=torch.int64, device=world.device)
    mine = torch.arange(world.rank, len(test_set), world.size)
    for start in range(0, len(mine), batch_size):
        chosen = mine[start : start + batch_size]
        predicted = module(to_inputs(test_set.pixels[chosen], world.device)).argmax(dim=1)
        correct += (predicted == test_set.labels[chosen].to(world.device)).sum()
    totals = torch.stack([correct, torch.tensor(len(mine), device=world.device)])
    if dist.is_initialized():
        dist.all_reduce(totals)
    right, tested = (int(total) for total in totals)
    if tested != len(test_set):
        raise RuntimeError(f"tested {tested} images, but the test set has {len(test_set)}")
    return right, tested


def train(args: argparse.Namespace, world: World) -> None:
    """Train up to ``args.epochs`` epochs; rank 0 prints one line per epoch and the summary."""
    torch.manual_seed(args.seed)
    train_set, test_set = on_every_rank(world, lambda: load_data(args))
    module = small_cnn().to(world.device)
    optimizer = torch.optim.SGD(module.parameters(), lr=args.lr, momentum=0.9)

    first_epoch = on_every_rank(world, lambda: start_epoch(args, world, module, optimizer))

    model: nn.Module = module
    if dist.is_initialized():
        device_ids = [world.device] if world.device.type == "cuda" else None
        model = DistributedDataParallel(module, device_ids=device_ids)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(
        train_set, world.size, world.rank, seed=args.seed
    )
    loader = DataLoader(
        train_set,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        collate_fn=as_it_is,
        pin_memory=world.device.type == "cuda",
    )
    if world.rank == 0:
        source = "generated images" if args.data is None else f"CIFAR-10 from {args.data}"
        print(
            f"{source}: {len(train_set)} for training, {len(test_set)} for testing; "
            f"ranks {world.size}, device {world.device}, backend {world.backend}",
            flush=True,
        )
        if args.resume:
            print(f"resumed from {args.checkpoint} after epoch {first_epoch}", flush=True)

    right, tested = 0, 0
    if first_epoch >= args.epochs:
        right, tested = evaluate(module, test_set, world, args.batch_size)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        title = f"epoch {epoch + 1}/{args.epochs}"
        bar = ProgressBar(title, len(loader), shown=world.rank == 0)
        loss = train_epoch(model, optimizer, loader, world.device, bar)
        right, tested = evaluate(module, test_set, world, args.batch_size)
        if world.rank == 0:
            print(
                f"{title} train loss {loss!r} test accuracy {right / tested:.4f} "
                f"({right} of {tested} test images)",
                flush=True,
            )
        if args.checkpoint is not None:
            if world.rank == 0:
                state = {
                    "model": module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch + 1,
                }
                write_checkpoint(args.checkpoint, state)
            if dist.is_initialized():
                dist.barrier()
    if world.rank == 0:
        print(
            f"summary: {max(first_epoch, args.epochs)} epochs, test accuracy "
            f"{right / tested:.4f} ({right} of {tested} test images)",
            flush=True,
        )


def main() -> None:
    """Run the job."""
    args = parse_args()
    world = join_world(args.backend)
    train(args, world)
    leave_world()


if __name__ == "__main__":
    main()
