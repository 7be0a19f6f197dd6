"""Train the GPT of ``transformer_lm.py`` under ``fully_shard``, which divides the model itself.

With DDP each rank has the whole model and optimizer; here (FSDP2) each has a part of every
parameter, of its gradient and of its optimizer state. A block's parameters are gathered before it
runs and dropped again after it. Checkpoints are folders in which each rank writes its own part;
another number of ranks can read them. The job runs under any launcher that sets RANK and its kin
(``ddpdoctor run``, ``torchrun``), or alone, as a single process that shards nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as sharded_files
from gpt import GPT, Size, Windows, load_text, next_token_loss
from job_setup import (
    World,
    add_backend,
    check_backend,
    join_world,
    leave_world,
    non_negative_int,
    positive_float,
    positive_int,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler


def find_fully_shard() -> Callable[..., Any] | None:
    """Return ``fully_shard`` from where the installed torch has it; None if it has none."""
    for place in ("torch.distributed.fsdp", "torch.distributed._composable.fsdp"):
        try:
            found: Callable[..., Any] = importlib.import_module(place).fully_shard
        except (ImportError, AttributeError):
            continue
        return found
    return None


def parse_args() -> tuple[argparse.Namespace, Windows, Windows]:
    """Return the checked options, the training and the validation text."""
    parser = argparse.ArgumentParser(description="Train a small GPT with fully_shard (FSDP2).")
    size = Size()
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: made-up words")
    parser.add_argument(
        "--text-size", type=positive_int, default=40_000, help="bytes of made-up words"
    )
    parser.add_argument("--layers", type=positive_int, default=size.layers)
    parser.add_argument("--heads", type=positive_int, default=size.heads)
    parser.add_argument("--channels", type=positive_int, default=size.channels)
    parser.add_argument("--context", type=positive_int, default=size.context)
    parser.add_argument("--epochs", type=positive_int, default=1)
    parser.add_argument("--batch-size", type=positive_int, default=16, help="pieces per rank")
    parser.add_argument("--lr", type=positive_float, default=3e-3)
    parser.add_argument("--seed", type=non_negative_int, default=0)
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="write the state into a folder of each epoch"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the state in the --checkpoint folder"
    )
    add_backend(parser)
    args = parser.parse_args()

    check_backend(parser, args.backend)
    fully_shard = find_fully_shard()
    if fully_shard is None:
        parser.error(f"torch {torch.__version__} has no fully_shard; it needs torch 2.4 or later")
    on_gpu = torch.cuda.is_available() and args.backend != "gloo"
    if "_composable" in fully_shard.__module__ and not on_gpu:
        parser.error(f"fully_shard of torch {torch.__version__} needs GPUs and NCCL; 2.6 does not")
    if args.channels % args.heads:
        parser.error(f"--channels {args.channels} cannot be divided among {args.heads} --heads")
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    if args.resume and newest_checkpoint(args.checkpoint) is None:
        parser.error(f"{args.checkpoint}: no checkpoint; run without --resume to start over")
    try:
        training, validation = load_text(args.text, args.text_size, args.seed, args.context)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if len(validation) < int(os.environ.get("WORLD_SIZE", "1")):
        parser.error(f"{len(validation)} pieces of text for validation: fewer than ranks")
    return args, training, validation


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint in ``folder``: its metadata are written at the end."""
    return max((each.parent for each in folder.glob("epoch-*/.metadata")), default=None)


def shard(model: GPT) -> None:
    """Divide the parameters of ``model`` among the ranks, in place."""
    fully_shard = find_fully_shard()
    assert fully_shard is not None
    # A block each: the parameters of one are gathered while the one before it computes. What is
    # left, embeddings and head, is a group of the whole model's own.
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> dict[str, Any]:
    """Return the state of this rank's part, for ``torch.distributed.checkpoint``."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "epoch": torch.tensor(epoch)}


def mean_over_ranks(total: Tensor, count: int) -> float:
    """Return the sum of ``total`` over all ranks, divided by that of ``count``."""
    sums = torch.stack([total.double(), torch.tensor(count, device=total.device).double()])
    if dist.is_initialized():
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


@torch.no_grad()
def validate(model: nn.Module, text: Windows, world: World, batch_size: int) -> float:
    """Return the mean loss per token of the validation text.

    Every forward pass gathers parameters, so all ranks must take the same number of batches: the
    last pieces are left out where they do not divide.
    """
    model.eval()
    pieces = range(world.rank, len(text) // world.size * world.size, world.size)
    loss_sum = torch.zeros((), device=world.device)
    for tokens, targets in DataLoader(Subset(text, pieces), batch_size=batch_size):
        logits = model(tokens.to(world.device))
        loss_sum += next_token_loss(logits, targets.to(world.device)) * len(tokens)
    return mean_over_ranks(loss_sum, len(pieces))


def train(args: argparse.Namespace, training: Windows, validation: Windows, world: World) -> None:
    """Train up to ``args.epochs`` epochs; rank 0 prints one line per epoch and the summary."""
    torch.manual_seed(args.seed)
    model = GPT(Size(args.layers, args.heads, args.channels, args.context)).to(world.device)
    parameters = sum(each.numel() for each in model.parameters())
    held = parameters
    if dist.is_initialized():
        shard(model)
        held = sum(each.to_local().numel() for each in model.parameters())  # type: ignore[attr-defined]
    # After sharding: the optimizer's state is then of the parts, too.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    first_epoch = 0
    newest = newest_checkpoint(args.checkpoint) if args.resume else None
    if newest is not None:
        state = state_of(model, optimizer, 0)
        sharded_files.load(state, checkpoint_id=newest)  # type: ignore[attr-defined]
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        first_epoch = int(state["epoch"])
    sampler: DistributedSampler[Any] = DistributedSampler(
        training, world.size, world.rank, seed=args.seed
    )
    loader = DataLoader(training, batch_size=args.batch_size, sampler=sampler)
    if world.rank == 0:
        print(
            f"GPT of {parameters:,} parameters, {held:,} of them on rank 0: ranks {world.size}, "
            f"device {world.device}, backend {world.backend}, {len(loader)} steps per epoch",
            flush=True,
        )
        if newest is not None:
            print(f"resumed from {newest} after epoch {first_epoch}", flush=True)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        loss_sum = torch.zeros((), device=world.device)
        for tokens, targets in loader:
            loss = next_token_loss(model(tokens.to(world.device)), targets.to(world.device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()
        mean_loss = mean_over_ranks(loss_sum, len(loader))
        validation_loss = validate(model, validation, world, args.batch_size)
        if world.rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs} loss {mean_loss:.6f} "
                f"validation loss {validation_loss:.6f}",
                flush=True,
            )
        if args.checkpoint is not None:
            # Every rank takes part: each writes what it holds.
            folder = args.checkpoint / f"epoch-{epoch + 1:06}"
            saved = state_of(model, optimizer, epoch + 1)
            sharded_files.save(saved, checkpoint_id=folder)  # type: ignore[attr-defined]
    validation_loss = validate(model, validation, world, args.batch_size)
    if world.rank == 0:
        epochs = max(first_epoch, args.epochs)
        print(f"summary: {epochs} epochs, validation loss {validation_loss:.6f}", flush=True)


def main() -> None:
    """Run the job."""
    args, training, validation = parse_args()
    world = join_world(args.backend)
    if world.backend == "gloo":
        # It gathers and scatters the parts on CPUs alone.
        world = replace(world, device=torch.device("cpu"))
    train(args, training, validation, world)
    leave_world()


if __name__ == "__main__":
    main()
