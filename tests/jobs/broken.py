"""Breaks one internal of ddpdoctor after the other, each in a forked rank of its own.

``broken.py NAME...`` breaks ``module:attribute`` below ``ddpdoctor.probe``; the name ``nothing``
breaks nothing. Each child trains a little; its losses and exit status are printed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
from typing import Any, NoReturn

import torch
import torch._dynamo  # DDP imports it: once for all children
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def broken(*args: Any, **kwargs: Any) -> NoReturn:
    raise ZeroDivisionError("broken by the test")


def break_(name: str) -> None:
    if "ddpdoctor.probe.process" not in sys.modules or name == "nothing":
        return
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(f"ddpdoctor.probe.{module}")
    *owners, last = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    original = getattr(owner, last)
    setattr(owner, last, broken)
    # Wherever it was imported by name, too.
    for module, content in list(sys.modules.items()):
        if module.startswith("ddpdoctor.probe"):
            for key, value in list(vars(content).items()):
                if value is original:
                    setattr(content, key, broken)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def train(name: str) -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    torch.manual_seed(1)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    losses = []
    for epoch in range(2):
        for (batch,) in DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4):
            optimizer.zero_grad()
            loss = ddp(batch).square().mean() + epoch
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            dist.all_reduce(loss.detach())
            losses.append(loss.item())
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            ddp(torch.ones(2, 8))
            ddp(torch.ones(2, 9))
    print(name, *map(repr, losses), torch.rand(1).item(), flush=True)
    # The reducer has to be gone before the group: freed as the last that holds it, it waits for
    # gloo's thread with the GIL held, which that thread may be waiting for (torch 2.13).
    del ddp, optimizer, scaler, loss, batch
    gc.collect()
    dist.destroy_process_group()


def main() -> None:
    for name in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            break_(name)
            train(name)
            return
        _, status = os.waitpid(child, 0)
        print("status", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
