"""Train ResNet-50 on random images and report the time of every iteration.

The job is a benchmark: its images are noise and every label is 1, so nothing but the speed and
the reproducibility of the training step matters. It runs under any launcher that sets ``RANK``,
``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` (``ddpdoctor run`` and
``torchrun`` do), or alone, as a single process without a process group.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import statistics
import sys
import time
from typing import NoReturn

import torch
import torch.distributed as dist
from job_setup import (
    World,
    check_backend,
    join_world,
    leave_world,
    non_negative_int,
    pick_device,
    positive_float,
    positive_int,
)
from models import resnet50
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

POOL_IMAGES = 64
"""Distinct random images; the data set repeats them."""

LABEL = 1
"""The class of every image."""


class RandomImages(Dataset[tuple[Tensor, Tensor]]):
    """``length`` images of uint8 noise, drawn once into a small pool and then repeated."""

    def __init__(self, length: int, image_size: int, seed: int) -> None:
        self.length = length
        self.pool = torch.randint(
            0,
            256,
            (POOL_IMAGES, 3, image_size, image_size),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one image ``[3, size, size]`` and its label, a scalar."""
        return self.pool[index % POOL_IMAGES], torch.tensor(LABEL)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return a whole batch at once: images ``[batch, 3, size, size]``, labels ``[batch]``.

        The loader prefers this over one ``__getitem__`` per image; a batch then costs one copy.
        """
        return self.pool[torch.tensor(indices) % POOL_IMAGES], torch.full((len(indices),), LABEL)


def as_it_is(batch: object) -> object:
    """Collate function for a data set whose ``__getitems__`` already returns a batch."""
    return batch


def parse_args() -> argparse.Namespace:
    """Return the checked options; those left out get the defaults of the device at hand."""
    parser = argparse.ArgumentParser(
        description="Train ResNet-50 on random images and report the time of every iteration.",
    )
    parser.add_argument(
        "--batch-size", type=positive_int, help="images per rank (GPU: 128, CPU: 2)"
    )
    parser.add_argument(
        "--image-size", type=positive_int, help="height and width in pixels (GPU: 224, CPU: 64)"
    )
    parser.add_argument(
        "--iterations", type=positive_int, help="training steps, with warm-up (GPU: 100, CPU: 30)"
    )
    parser.add_argument(
        "--warmup",
        type=non_negative_int,
        help="first steps that the summary leaves out (default: 3, fewer in a run of under 4)",
    )
    parser.add_argument(
        "--break-at",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="stop every rank in the debugger at iteration N",
    )
    parser.add_argument("--lr", type=positive_float, default=1e-5, help="default: %(default)s")
    parser.add_argument("--seed", type=non_negative_int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--ddp-mode",
        choices=("torch", "apex"),
        default="torch",
        help="whose DistributedDataParallel wraps the model (default: %(default)s)",
    )
    parser.add_argument(
        "--bucket-cap-mb",
        type=positive_float,
        help="gradient bucket size in MiB, for --ddp-mode torch (default: that of torch)",
    )
    parser.add_argument(
        "--backend",
        choices=("gloo", "nccl", "apex"),
        help="default: nccl if there is a GPU for every local rank, else gloo; apex is short for "
        "--ddp-mode apex",
    )
    baseline = parser.add_mutually_exclusive_group()
    baseline.add_argument(
        "--single", action="store_true", help="train in one process on one device, without DDP"
    )
    baseline.add_argument(
        "--dataparallel",
        action="store_true",
        help="train in one process on all its GPUs with nn.DataParallel",
    )
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    args.batch_size = args.batch_size or (128 if on_gpu else 2)
    args.image_size = args.image_size or (224 if on_gpu else 64)
    args.iterations = args.iterations or (100 if on_gpu else 30)
    if args.warmup is None:
        args.warmup = min(3, args.iterations - 1)

    if args.backend == "apex":
        args.backend, args.ddp_mode = None, "apex"
    if args.single or args.dataparallel:
        check_baseline(parser, args)
    if args.warmup >= args.iterations:
        parser.error(f"--warmup {args.warmup} leaves none of {args.iterations} iterations to time")
    if args.batch_size == 1 and args.image_size <= 32:
        # The last feature map is 1x1 then, and BatchNorm cannot train on one value per channel.
        parser.error("--batch-size 1 needs an --image-size above 32")
    if args.ddp_mode == "apex" and args.bucket_cap_mb is not None:
        parser.error("--bucket-cap-mb applies to --ddp-mode torch alone")
    check_backend(parser, args.backend)
    return args


def check_baseline(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a line and status 2 if the options do not fit a job of one process."""
    option = "--single" if args.single else "--dataparallel"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error(f"{option} trains in one process: start it alone, or on 1 rank")
    if args.ddp_mode == "apex" or args.backend or args.bucket_cap_mb:
        parser.error(f"{option} has no DDP: leave out --ddp-mode, --backend and --bucket-cap-mb")
    if args.dataparallel and not torch.cuda.is_available():
        parser.error("--dataparallel needs a GPU; on a CPU nn.DataParallel is the model itself")


def fail(world: World, message: str) -> NoReturn:
    """End with one error line from rank 0 and status 2; every rank must call this."""
    if world.rank == 0:
        print(f"resnet50_synthetic.py: error: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        # A launcher may kill the other ranks as soon as one has ended: rank 0 prints first.
        dist.barrier()
    leave_world()
    raise SystemExit(2)


def wrap(model: nn.Module, world: World, args: argparse.Namespace) -> nn.Module:
    """Return ``model`` in the wanted DistributedDataParallel, or itself in a single process."""
    if args.ddp_mode == "apex":
        try:
            apex_ddp = importlib.import_module("apex.parallel").DistributedDataParallel
        except (ImportError, AttributeError):
            fail(
                world,
                "--ddp-mode apex needs NVIDIA Apex, and apex.parallel cannot be imported: build "
                "tag 25.05 of https://github.com/NVIDIA/apex, the last that has it, or use "
                "--ddp-mode torch",
            )
        if world.device.type != "cuda":
            fail(world, "--ddp-mode apex needs a GPU; use --ddp-mode torch")
        if dist.is_initialized():
            wrapped: nn.Module = apex_ddp(model)
            return wrapped
    if args.dataparallel:
        return nn.DataParallel(model)
    if not dist.is_initialized():
        return model
    device_ids = [world.device] if world.device.type == "cuda" else None
    if args.bucket_cap_mb is None:
        return DistributedDataParallel(model, device_ids=device_ids)
    return DistributedDataParallel(model, device_ids=device_ids, bucket_cap_mb=args.bucket_cap_mb)


def clock(device: torch.device) -> float:
    """Return the time in seconds once all work queued on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def summarize(times: list[float], images_per_step: int, warmup: int) -> str:
    """Return the summary line for the step times in seconds of one rank, without warm-up."""
    p95 = sorted(times)[math.ceil(0.95 * len(times)) - 1]
    rate = images_per_step * len(times) / sum(times)
    return (
        f"summary: {len(times)} iterations after {warmup} of warm-up, "
        f"time median {statistics.median(times):.6f} s p95 {p95:.6f} s, {rate:.2f} images/s"
    )


def train(args: argparse.Namespace, world: World) -> None:
    """Train for ``args.iterations`` steps; rank 0 prints one line per step and the summary."""
    torch.manual_seed(args.seed)
    model = wrap(resnet50().to(world.device), world, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    # DataParallel deals each batch out to all GPUs.
    batch_size = args.batch_size * (torch.cuda.device_count() if args.dataparallel else 1)
    step_images = batch_size * world.size
    dataset = RandomImages(args.iterations * step_images, args.image_size, args.seed)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(
        dataset, world.size, world.rank, seed=args.seed
    )
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=as_it_is,
        pin_memory=world.device.type == "cuda",
    )
    if world.rank == 0:
        print(
            f"ResNet-50: ranks {world.size}, device {world.device}, backend {world.backend}, "
            f"{batch_size} images of {args.image_size}x{args.image_size} per rank, "
            f"{args.iterations} iterations",
            flush=True,
        )

    times: list[float] = []
    images: Tensor
    labels: Tensor
    started = clock(world.device)
    for iteration, (images, labels) in enumerate(loader, start=1):
        inputs = images.to(world.device, non_blocking=True).float().div_(127.5).sub_(1.0)
        targets = labels.to(world.device, non_blocking=True)
        if iteration == args.break_at:
            # What breakpoint() calls. Its own name, anywhere in a job, tells ddpdoctor to lift the
            # timeouts of the whole run.
            sys.breakpointhook()
        loaded = clock(world.device)
        loss = criterion(model(inputs), targets)
        forwarded = clock(world.device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        backwarded = clock(world.device)
        optimizer.step()
        ended = clock(world.device)
        times.append(ended - started)
        if world.rank == 0:
            print(
                f"iteration {iteration}/{args.iterations} time {ended - started:.6f} s "
                f"fp_time {forwarded - loaded:.6f} s bp_time {backwarded - forwarded:.6f} s "
                f"loss {loss.item()!r}",
                flush=True,
            )
        # The next step starts here: printing is no part of any step.
        started = clock(world.device)

    if world.rank == 0:
        print(summarize(times[args.warmup :], step_images, args.warmup), flush=True)


def main() -> None:
    """Run the job."""
    args = parse_args()
    if args.single or args.dataparallel:
        world = World(rank=0, size=1, device=pick_device(0), backend="none")
    else:
        world = join_world(args.backend)
    train(args, world)
    leave_world()


if __name__ == "__main__":
    main()
