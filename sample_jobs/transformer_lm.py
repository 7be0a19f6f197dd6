"""Train a small GPT on text: what most people run on several GPUs today.

Data parallel with gradient accumulation (the ranks exchange gradients once per optimizer step, not
once per micro-batch), bfloat16 autocast, clipped gradients, a cosine schedule with warm-up, and
checkpoints from which the job resumes as if it had not stopped. It runs under any launcher that
sets RANK and its kin (``ddpdoctor run``, ``torchrun``), or alone, as a single process.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Size, Windows, load_text, next_token_loss
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

MAX_NORM = 1.0
"""Gradients are scaled down to this norm."""


def parse_args() -> tuple[argparse.Namespace, Windows, Windows, dict[str, Any] | None]:
    """Return the checked options, training and validation text, and the state to resume from."""
    parser = argparse.ArgumentParser(description="Train a small GPT with DDP.")
    size = Size()
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: made-up words")
    parser.add_argument(
        "--text-size", type=positive_int, default=40_000, help="bytes of made-up words"
    )
    parser.add_argument("--layers", type=positive_int, default=size.layers)
    parser.add_argument("--heads", type=positive_int, default=size.heads)
    parser.add_argument("--channels", type=positive_int, default=size.channels)
    parser.add_argument("--context", type=positive_int, default=size.context)
    parser.add_argument("--epochs", type=positive_int, default=2)
    parser.add_argument(
        "--batch-size", type=positive_int, default=8, help="pieces per rank and micro-batch"
    )
    parser.add_argument(
        "--accumulate", type=positive_int, default=2, help="micro-batches per optimizer step"
    )
    parser.add_argument("--lr", type=positive_float, default=3e-3, help="at its highest")
    parser.add_argument("--warmup", type=non_negative_int, default=10, help="steps up to there")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--seed", type=non_negative_int, default=0)
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="write the state here after every epoch"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the state in the --checkpoint file"
    )
    add_backend(parser)
    args = parser.parse_args()

    check_backend(parser, args.backend)
    if args.channels % args.heads:
        parser.error(f"--channels {args.channels} cannot be divided among {args.heads} --heads")
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    if args.checkpoint is not None and not args.checkpoint.parent.is_dir():
        parser.error(f"{args.checkpoint}: its folder does not exist; create it first")
    try:
        text = load_text(args.text, args.text_size, args.seed, args.context)
        state = None
        if args.resume:
            state = read_checkpoint(args.checkpoint, {"model", "optimizer", "schedule", "epoch"})
    except (OSError, ValueError, InputError) as error:
        parser.error(str(error))
    return args, *text, state


def cosine_schedule(
    optimizer: torch.optim.Optimizer, warmup: int, total: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule: up in a line for ``warmup`` steps, then down to 0 along a cosine."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def validate(module: nn.Module, text: Windows, world: World, args: argparse.Namespace) -> float:
    """Return the mean loss per token of the validation text; every piece counts once."""
    module.eval()
    # Mean loss times pieces, and pieces; ranks may have different numbers of them.
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    mine = Subset(text, range(world.rank, len(text), world.size))
    for tokens, targets in DataLoader(mine, batch_size=args.batch_size):
        logits = module(tokens.to(world.device))
        loss = next_token_loss(logits, targets.to(world.device))
        totals[0] += loss * len(tokens)
        totals[1] += len(tokens)
    if dist.is_initialized():
        dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    loader: DataLoader[Any],
    world: World,
    args: argparse.Namespace,
) -> float:
    """Train for one epoch; return the mean loss per token over all ranks."""
    model.train()
    loss_sum = torch.zeros((), device=world.device)
    for number, (tokens, targets) in enumerate(loader):
        last = (number + 1) % args.accumulate == 0 or number + 1 == len(loader)
        # The last step of an epoch may have fewer micro-batches than the others.
        first = number - number % args.accumulate
        micro_batches = min(args.accumulate, len(loader) - first)
        local: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(model, DistributedDataParallel) and not last:
            local = model.no_sync()
        # Forward and backward belong inside: no_sync() around backward alone has no effect.
        with local:
            with torch.autocast(
                world.device.type, dtype=torch.bfloat16, enabled=args.precision == "bf16"
            ):
                logits = model(tokens.to(world.device))
                loss = next_token_loss(logits, targets.to(world.device))
            (loss / micro_batches).backward()
        loss_sum += loss.detach()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    if dist.is_initialized():
        dist.all_reduce(loss_sum)
    return loss_sum.item() / len(loader) / world.size


def train(
    args: argparse.Namespace,
    training: Windows,
    validation: Windows,
    state: dict[str, Any] | None,
    world: World,
) -> None:
    """Train up to ``args.epochs`` epochs; rank 0 prints one line per epoch and the summary."""
    torch.manual_seed(args.seed)
    module = GPT(Size(args.layers, args.heads, args.channels, args.context)).to(world.device)
    sampler: DistributedSampler[Any] = DistributedSampler(
        training, world.size, world.rank, seed=args.seed, drop_last=len(training) > world.size
    )
    loader = DataLoader(training, batch_size=args.batch_size, sampler=sampler)
    steps = math.ceil(len(loader) / args.accumulate)
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr)
    schedule = cosine_schedule(optimizer, args.warmup, args.epochs * steps)
    first_epoch = 0
    if state is not None:
        # Into the module, not into DDP around it: the names have no "module." then.
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first_epoch = state["epoch"]
    model: nn.Module = module
    if dist.is_initialized():
        device_ids = [world.device] if world.device.type == "cuda" else None
        model = DistributedDataParallel(module, device_ids=device_ids)
    if world.rank == 0:
        parameters = sum(each.numel() for each in module.parameters())
        print(
            f"GPT of {parameters:,} parameters: ranks {world.size}, device {world.device}, backend "
            f"{world.backend}, {steps} steps of {args.accumulate} micro-batches per epoch",
            flush=True,
        )
        if state is not None:
            print(f"resumed from {args.checkpoint} after epoch {first_epoch}", flush=True)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, optimizer, schedule, loader, world, args)
        validation_loss = validate(module, validation, world, args)
        if world.rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs} loss {loss:.6f} "
                f"validation loss {validation_loss:.6f} lr {schedule.get_last_lr()[0]:.6f}",
                flush=True,
            )
            if args.checkpoint is not None:
                saved = {
                    "model": module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "epoch": epoch + 1,
                }
                write_checkpoint(args.checkpoint, saved)
        if dist.is_initialized() and args.checkpoint is not None:
            # No rank ends before the file is there.
            dist.barrier()
    validation_loss = validate(module, validation, world, args)
    if world.rank == 0:
        print(
            f"summary: {max(first_epoch, args.epochs)} epochs, validation loss "
            f"{validation_loss:.6f} a byte, perplexity {math.exp(validation_loss):.2f}",
            flush=True,
        )


def main() -> None:
    """Run the job."""
    args, training, validation, state = parse_args()
    world = join_world(args.backend)
    train(args, training, validation, state, world)
    leave_world()


if __name__ == "__main__":
    main()
