"""Fine-tune ResNet-34 on a folder of pictures with one folder per class, such as flowers.

It starts from trained weights (``--weights``), can leave the first layers as they are
(``--freeze``) and warms the learning rate up. Rank 0 alone reads the weights and logs; loss and
accuracy are of all ranks. It runs under any launcher that sets RANK and its kin (``ddpdoctor
run``, ``torchrun``), or alone, as a single process.

``--show-sampler`` prints which samples DistributedSampler and BatchSampler give to each rank.
"""

from __future__ import annotations

import argparse
import math
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
    one_line,
    positive_float,
    positive_int,
)
from models import from_torchvision, resnet34
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

Pictures = FolderImages | GeneratedImages

STAGES_BEGIN = 4
"""The first four modules of a ResNet are its stem, the next four its stages."""


def parse_args() -> argparse.Namespace:
    """Return the options, each checked for itself."""
    parser = argparse.ArgumentParser(description="Fine-tune ResNet-34 on a folder of pictures.")
    parser.add_argument(
        "--show-sampler", action="store_true", help="print what the samplers do, and end"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="one folder per class in it")
    parser.add_argument("--train-size", type=positive_int, help="generated pictures (default: 160)")
    parser.add_argument("--test-size", type=positive_int, help="generated pictures (default: 50)")
    parser.add_argument("--image-size", type=positive_int, help="pixels (GPU: 224, CPU: 32)")
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="of torchvision's resnet34, to start from"
    )
    parser.add_argument(
        "--freeze",
        type=int,
        choices=range(5),
        metavar="N",
        help="leave the stem and the first N of the four stages as they are",
    )
    parser.add_argument("--sync-bn", action="store_true", help="SyncBatchNorm; needs GPUs")
    parser.add_argument("--epochs", type=positive_int, default=4, help="default: %(default)s")
    parser.add_argument(
        "--warmup-epochs",
        type=non_negative_int,
        default=1,
        help="epochs in which the learning rate rises to --lr (default: %(default)s)",
    )
    parser.add_argument("--batch-size", type=positive_int, default=8, help="pictures per rank")
    parser.add_argument("--workers", type=non_negative_int, default=0, help="of each loader")
    parser.add_argument("--lr", type=positive_float, default=0.01, help="default: %(default)s")
    parser.add_argument("--seed", type=non_negative_int, default=0, help="default: %(default)s")
    add_backend(parser)
    args = parser.parse_args()

    check_backend(parser, args.backend)
    args.image_size = args.image_size or (224 if torch.cuda.is_available() else 32)
    if args.data is not None and (args.train_size or args.test_size):
        parser.error("--train-size and --test-size apply to generated pictures, not to --data")
    if args.sync_bn and not torch.cuda.is_available():
        parser.error("--sync-bn needs GPUs: torch has no SyncBatchNorm for CPUs")
    if args.batch_size == 1:
        parser.error("--batch-size 1: BatchNorm needs at least 2 pictures per rank")
    try:
        args.sets = load_pictures(args)
        args.state = None if args.weights is None else load_weights(args.weights)
    except InputError as error:
        parser.error(str(error))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if len(args.sets[0]) < ranks * args.batch_size:
        parser.error(
            f"{len(args.sets[0])} pictures for training: fewer than one batch of "
            f"{args.batch_size} for each of {ranks} ranks"
        )
    return args


def load_pictures(args: argparse.Namespace) -> tuple[Pictures, Pictures, int]:
    """Return the pictures for training and for testing, and the number of classes."""
    if args.data is None:
        train_size, test_size = args.train_size or 160, args.test_size or 50
        return (
            GeneratedImages(train_size, 5, args.image_size, args.seed, augment=True),
            GeneratedImages(test_size, 5, args.image_size, args.seed + 1, augment=False),
            5,
        )
    pictures, classes = scan_folder(args.data)
    # Every fifth picture is for testing; the list has the same order on every rank.
    training = [each for number, each in enumerate(pictures) if number % 5]
    return (
        FolderImages(training, args.image_size, augment=True),
        FolderImages(pictures[::5], args.image_size, augment=False),
        len(classes),
    )


def load_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of torchvision's resnet34 in ``path``, without its last layer."""
    try:
        state = from_torchvision(torch.load(path, map_location="cpu", weights_only=True))
        kept = {name: value for name, value in state.items() if not name.startswith("10.")}
        resnet34().load_state_dict(kept, strict=False)
    except Exception as error:
        # A file of another kind can make the reader raise nearly anything.
        raise InputError(f"{path}: no weights of a ResNet-34 ({one_line(error)})") from error
    if not kept:
        raise InputError(f"{path}: no weights of a ResNet-34 (it is empty)")
    return kept


def show_sampler() -> None:
    """Print which of 11 samples two ranks get, and in which batches."""
    samples: Any = list(range(11))
    for rank in range(2):
        sampler: DistributedSampler[Any] = DistributedSampler(
            samples, num_replicas=2, rank=rank, shuffle=False
        )
        print(f"rank {rank} of 2, {len(samples)} samples: {list(sampler)}")
        for drop_last in (False, True):
            batches = list(BatchSampler(sampler, batch_size=4, drop_last=drop_last))
            print(f"  batches of 4, drop_last={drop_last}: {batches}")
    print(
        "11 samples on 2 ranks become 6 for each, the first one being there twice: every rank "
        "has to take as many steps. DistributedSampler(drop_last=True) leaves sample 10 out.",
        flush=True,
    )


def build_model(args: argparse.Namespace, classes: int, world: World) -> nn.Sequential:
    """Return the network on this rank's device, with the weights of rank 0."""
    model = resnet34(classes)
    if args.state is not None:
        model.load_state_dict(args.state, strict=False)
    if args.freeze is not None:
        # Before DDP is built: it has to know which parameters get gradients.
        model[: STAGES_BEGIN + args.freeze].requires_grad_(False)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    model.to(world.device)
    if dist.is_initialized():
        # DDP does the same when it is built; a job that averages gradients by hand must do it.
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)
    return model


def train_epoch(
    model: nn.Module,
    frozen: list[nn.Module],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    loader: DataLoader[Any],
    world: World,
) -> tuple[float, float]:
    """Train for one epoch; return loss and accuracy per picture over all ranks."""
    criterion = nn.CrossEntropyLoss()
    model.train()
    for module in frozen:
        # BatchNorm would go on changing its statistics.
        module.eval()
    # Loss, correct ones and pictures, kept on the device.
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    for images, labels in loader:
        targets = labels.to(world.device)
        logits = model(images.to(world.device))
        loss = criterion(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        sums[0] += loss.detach() * len(targets)
        sums[1] += (logits.argmax(dim=1) == targets).sum()
        sums[2] += len(targets)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


@torch.no_grad()
def evaluate(module: nn.Module, pictures: Pictures, world: World, batch_size: int) -> float:
    """Return the accuracy; every picture counts once."""
    if dist.is_initialized():
        # BatchNorm's statistics differ from rank to rank; all test with those of rank 0.
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
    module.eval()
    correct = torch.zeros((), dtype=torch.int64, device=world.device)
    # Not by DistributedSampler: it would count the first pictures twice.
    mine = Subset(pictures, range(world.rank, len(pictures), world.size))
    for images, labels in DataLoader(mine, batch_size=batch_size):
        correct += (module(images.to(world.device)).argmax(dim=1).cpu() == labels).sum()
    if dist.is_initialized():
        dist.all_reduce(correct)
    return int(correct.item()) / len(pictures)


def train(args: argparse.Namespace, world: World) -> None:
    """Train; rank 0 prints one line per epoch and the summary."""
    training, testing, classes = args.sets
    torch.manual_seed(args.seed)
    module = build_model(args, classes, world)
    # From here on each rank cuts and flips its pictures in its own way.
    torch.manual_seed(args.seed + world.rank)
    frozen = [each for each in module if not any(p.requires_grad for p in each.parameters())]
    model: nn.Module = module
    if dist.is_initialized():
        device_ids = [world.device] if world.device.type == "cuda" else None
        model = DistributedDataParallel(module, device_ids=device_ids)

    sampler: DistributedSampler[Any] = DistributedSampler(
        training, world.size, world.rank, seed=args.seed
    )
    # The same as batch_size=... and drop_last=True of the loader, said in full.
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    loader = DataLoader(training, batch_sampler=batches, num_workers=args.workers)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=args.lr, momentum=0.9, weight_decay=5e-5)
    warmup: int = args.warmup_epochs * len(loader)
    total: int = args.epochs * len(loader)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    if world.rank == 0:
        print(
            f"ResNet-34: ranks {world.size}, device {world.device}, backend {world.backend}, "
            f"{classes} classes, {len(training)} pictures for training, {len(testing)} for "
            f"testing, {sum(p.numel() for p in trained):,} parameters train",
            flush=True,
        )
    accuracy = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss, seen = train_epoch(model, frozen, optimizer, schedule, loader, world)
        accuracy = evaluate(module, testing, world, args.batch_size)
        if world.rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs} loss {loss:.4f} accuracy {seen:.4f} "
                f"test accuracy {accuracy:.4f}",
                flush=True,
            )
    if world.rank == 0:
        print(f"summary: {args.epochs} epochs, test accuracy {accuracy:.4f}", flush=True)


def main() -> None:
    """Run the job."""
    args = parse_args()
    if args.show_sampler:
        if os.environ.get("RANK", "0") == "0":
            show_sampler()
        return
    world = join_world(args.backend)
    train(args, world)
    leave_world()


if __name__ == "__main__":
    main()
