"""Train a ResNet by the classic ImageNet recipe, with an evaluation that is exact.

SGD with momentum, a learning rate that drops to a tenth every ``--lr-step`` epochs, mixed precision
by option, checkpoints without DDP's ``module.`` in their names, and an evaluation that all ranks
share and that counts every picture once: where DistributedSampler would repeat some pictures so
that all ranks get as many, each rank takes every n-th one here. ``--data DIR`` names a folder with
``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``. The job runs under any launcher that sets RANK and
its kin (``ddpdoctor run``, ``torchrun``), or alone, as a single process.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from image_folders import FolderImages, GeneratedImages, scan_folder
from job_setup import (
    InputError,
    World,
    add_backend,
    check_backend,
    join_world,
    leave_world,
    non_negative_int,
    positive_float,
    positive_int,
    read_checkpoint,
    write_checkpoint,
)
from models import resnet18, resnet50
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

ARCHITECTURES = {"resnet18": resnet18, "resnet50": resnet50}
ENTRIES = {"architecture", "epoch", "best", "model", "optimizer", "schedule", "scaler"}
"""What a checkpoint holds."""

Pictures = FolderImages | GeneratedImages


def parse_args() -> argparse.Namespace:
    """Return the checked options, with the pictures and the state to resume from."""
    parser = argparse.ArgumentParser(description="Train a ResNet by the classic ImageNet recipe.")
    parser.add_argument("--arch", choices=tuple(ARCHITECTURES), default="resnet18")
    parser.add_argument("--data", type=Path, metavar="DIR", help="with train/ and val/ in it")
    parser.add_argument("--train-size", type=positive_int, help="generated pictures (default: 192)")
    parser.add_argument("--test-size", type=positive_int, help="generated pictures (default: 51)")
    parser.add_argument("--image-size", type=positive_int, help="pixels (GPU: 224, CPU: 32)")
    parser.add_argument("--epochs", type=positive_int, default=4, help="default: %(default)s")
    parser.add_argument(
        "--batch-size", type=positive_int, help="pictures per rank (GPU: 128, CPU: 8)"
    )
    parser.add_argument("--workers", type=non_negative_int, default=0, help="of each loader")
    parser.add_argument("--lr", type=positive_float, default=0.02, help="default: %(default)s")
    parser.add_argument(
        "--lr-step", type=positive_int, default=30, help="epochs until a tenth of it"
    )
    parser.add_argument(
        "--amp", action="store_true", help="mixed precision: float16 on GPUs, bfloat16 on CPUs"
    )
    parser.add_argument("--evaluate", action="store_true", help="test only, after --resume")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="write the state here after every epoch"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the state in the --checkpoint file"
    )
    parser.add_argument("--seed", type=non_negative_int, default=0, help="default: %(default)s")
    add_backend(parser)
    args = parser.parse_args()

    check_backend(parser, args.backend)
    on_gpu = torch.cuda.is_available()
    args.image_size = args.image_size or (224 if on_gpu else 32)
    args.batch_size = args.batch_size or (128 if on_gpu else 8)
    if args.data is not None and (args.train_size or args.test_size):
        parser.error("--train-size and --test-size apply to generated pictures, not to --data")
    if args.batch_size == 1:
        parser.error("--batch-size 1: BatchNorm needs at least 2 pictures per rank")
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    if args.checkpoint is not None and not args.checkpoint.parent.is_dir():
        parser.error(f"{args.checkpoint}: its folder does not exist; create it first")
    try:
        args.training, args.testing, args.classes = load_pictures(args)
        args.state = read_checkpoint(args.checkpoint, ENTRIES) if args.resume else None
    except InputError as error:
        parser.error(str(error))
    if args.state is not None and args.state["architecture"] != [args.arch, args.classes]:
        architecture, classes = args.state["architecture"]
        parser.error(f"{args.checkpoint}: holds a {architecture} of {classes} classes")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if len(args.training) < ranks * args.batch_size:
        parser.error(
            f"{len(args.training)} pictures for training: fewer than one batch of "
            f"{args.batch_size} for each of {ranks} ranks"
        )
    return args


def load_pictures(args: argparse.Namespace) -> tuple[Pictures, Pictures, int]:
    """Return the pictures for training and for testing, and the number of classes."""
    if args.data is None:
        size, seed = args.image_size, args.seed
        training = GeneratedImages(args.train_size or 192, 10, size, seed, augment=True)
        return (
            training,
            GeneratedImages(args.test_size or 51, 10, size, seed + 1, augment=False),
            10,
        )
    pictures, classes = scan_folder(args.data / "train")
    tests, test_classes = scan_folder(args.data / "val")
    if classes != test_classes:
        raise InputError(f"{args.data}: train and val have different folders")
    return (
        FolderImages(pictures, args.image_size, augment=True),
        FolderImages(tests, args.image_size, augment=False),
        len(classes),
    )


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    loader: DataLoader[Any],
    world: World,
    args: argparse.Namespace,
) -> float:
    """Train for one epoch; return the mean loss over all ranks."""
    model.train()
    criterion = nn.CrossEntropyLoss()
    loss_sum = torch.zeros((), device=world.device)
    precision = torch.float16 if world.device.type == "cuda" else torch.bfloat16
    for images, labels in loader:
        with torch.autocast(world.device.type, dtype=precision, enabled=args.amp):
            logits = model(images.to(world.device, non_blocking=True))
            loss = criterion(logits, labels.to(world.device, non_blocking=True))
        optimizer.zero_grad()
        # float16 has few small numbers: the scaler keeps gradients above them. It passes
        # everything on as it is where it is not enabled.
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss_sum += loss.detach()
    if dist.is_initialized():
        dist.all_reduce(loss_sum)
    return loss_sum.item() / len(loader) / world.size


@torch.no_grad()
def evaluate(module: nn.Module, args: argparse.Namespace, world: World) -> tuple[int, int, int]:
    """Return how many pictures the first and the first five answers name, and how many there are.

    Ranks may have different numbers of batches, so this must use the bare ``module``: DDP around it
    could wait for a batch that another rank does not have.
    """
    if dist.is_initialized():
        # BatchNorm's statistics differ from rank to rank; all test with those of rank 0,
        # which the checkpoint gets, too.
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
    module.eval()
    counts = torch.zeros(3, dtype=torch.int64, device=world.device)
    mine = Subset(args.testing, range(world.rank, len(args.testing), world.size))
    for images, labels in DataLoader(mine, args.batch_size, num_workers=args.workers):
        targets = labels.to(world.device)
        best = module(images.to(world.device)).topk(min(5, args.classes), dim=1).indices
        hits = best == targets.unsqueeze(1)
        counts += torch.stack(
            [hits[:, 0].sum(), hits.sum(), torch.tensor(len(targets), device=world.device)]
        )
    if dist.is_initialized():
        dist.all_reduce(counts)
    first, five, tested = counts.tolist()
    return first, five, tested


def train(args: argparse.Namespace, world: World) -> None:
    """Train up to ``args.epochs`` epochs; rank 0 prints one line per epoch and the summary."""
    torch.manual_seed(args.seed)
    module = ARCHITECTURES[args.arch](args.classes).to(world.device)
    optimizer = torch.optim.SGD(module.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step, gamma=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp and world.device.type == "cuda")
    first_epoch, best = 0, 0.0
    if args.state is not None:
        module.load_state_dict(args.state["model"])
        optimizer.load_state_dict(args.state["optimizer"])
        schedule.load_state_dict(args.state["schedule"])
        if args.state["scaler"]:
            scaler.load_state_dict(args.state["scaler"])
        first_epoch, best = args.state["epoch"], args.state["best"]
    model: nn.Module = module
    if dist.is_initialized():
        device_ids = [world.device] if world.device.type == "cuda" else None
        model = DistributedDataParallel(module, device_ids=device_ids)
    sampler: DistributedSampler[Any] = DistributedSampler(
        args.training, world.size, world.rank, seed=args.seed
    )
    loader = DataLoader(
        args.training,
        args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        pin_memory=world.device.type == "cuda",
        drop_last=True,
    )
    if world.rank == 0:
        print(
            f"{args.arch}: ranks {world.size}, device {world.device}, backend {world.backend}, "
            f"{args.classes} classes, {len(args.training)} pictures for training, "
            f"{len(args.testing)} for testing",
            flush=True,
        )
        if args.state is not None:
            print(f"resumed from {args.checkpoint} after epoch {first_epoch}", flush=True)

    for epoch in range(first_epoch, 0 if args.evaluate else args.epochs):
        sampler.set_epoch(epoch)
        # Each rank flips its pictures in its own way, and a resumed job as one that never stopped.
        torch.manual_seed(args.seed + 1 + epoch * world.size + world.rank)
        rate = schedule.get_last_lr()[0]
        loss = train_epoch(model, optimizer, scaler, loader, world, args)
        schedule.step()
        first, five, tested = evaluate(module, args, world)
        best = max(best, first / tested)
        if world.rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs} lr {rate:g} loss {loss:.4f} "
                f"top-1 {first / tested:.4f} top-5 {five / tested:.4f}",
                flush=True,
            )
        if world.rank == 0 and args.checkpoint is not None:
            state = {
                "architecture": [args.arch, args.classes],
                "epoch": epoch + 1,
                "best": best,
                # Of the module in DDP: the names then fit a model without DDP, too.
                "model": module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "scaler": scaler.state_dict(),
            }
            write_checkpoint(args.checkpoint, state)
        if dist.is_initialized():
            # No rank ends before the file is there.
            dist.barrier()
    first, five, tested = evaluate(module, args, world)
    if world.rank == 0:
        print(
            f"summary: top-1 {first / tested:.4f} ({first} of {tested} pictures), "
            f"top-5 {five / tested:.4f}, best top-1 {max(best, first / tested):.4f}",
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
