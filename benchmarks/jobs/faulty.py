"""A job of three ranks that goes wrong on one of them, at one step, in one of nine ways.

The line that is to be named carries the fault's name in a comment.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save_checkpoint() -> None:
    time.sleep(600)  # fault: sleep


def check(loss: torch.Tensor) -> None:
    raise ValueError(f"a loss of {loss.item():.3f}")  # fault: exception


def wait_for_server() -> None:
    ready = False
    while not ready:  # fault: loop
        pass


def validate(seconds: float) -> None:
    """Work of rank 0 alone, while the others are in a barrier."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.randn(64, 64).matmul(torch.randn(64, 64))


def model(kind: str) -> nn.Module:
    if kind == "batchnorm":
        return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--at", type=int, default=5)
    parser.add_argument("--kind", default="plain", help="plain, batchnorm or accumulating")
    parser.add_argument("--healthy", default="", help="validation, checkpoint or first-step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model(options.kind))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    if options.healthy == "first-step" and rank == 0:
        validate(8.0)
    for step in range(14):
        fault = options.fault if rank == options.rank and step == options.at else ""
        torch.manual_seed(100 * step + rank)
        if fault == "sleep":
            save_checkpoint()
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)  # fault: stop
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)  # fault: kill
        optimizer.zero_grad()
        if options.kind == "accumulating":
            with ddp.no_sync():
                ddp(torch.randn(8, 16)).square().mean().backward()
        loss = ddp(torch.randn(8, 16)).square().mean()
        if fault == "exception":
            check(loss)
        loss.backward()
        optimizer.step()
        metrics = torch.ones(65 if fault == "shape" else 64)
        if fault == "op":
            dist.all_reduce(metrics, dist.ReduceOp.MAX)  # fault: op
        elif fault != "missing":
            dist.all_reduce(metrics)  # fault: shape missing
        if fault == "exit":
            os._exit(3)  # fault: exit
        if fault == "loop":
            wait_for_server()
        if step == options.at and options.healthy == "validation":
            if rank == 0:
                validate(20.0)
            dist.barrier()
        if step == options.at and options.healthy == "checkpoint" and rank == 0:
            time.sleep(4.0)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
