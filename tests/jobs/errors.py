"""Raises and catches errors in every place that a training script has, and prints the tracebacks.

Then it warns in every place, and tells what the errors it caught keep alive. A single rank.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Big:
    """Stands for the tensors of a failed step."""


alive: list[weakref.ref[Big]] = []


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: Tensor, fail: bool = False) -> Any:
        big = Big()
        alive.append(weakref.ref(big))
        if fail:
            raise ValueError("in forward")
        return self.layer(batch)


class Bad(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        if index == 3:
            raise KeyError("in getitem")
        return torch.ones(4)


class BadStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(4)
        raise ValueError("in the stream")


class BadOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("in step")


def fail_in_hook(grad: Tensor) -> Tensor:
    raise ValueError("in a gradient hook")


def closure() -> float:
    raise ValueError("in a closure")


def causes(ddp: DistributedDataParallel) -> Iterator[tuple[str, Callable[[], object]]]:
    batch = torch.ones(4, 4)
    loss = ddp(batch).sum()
    hooked = ddp(batch)
    hooked.register_hook(fail_in_hook)
    parameters = list(ddp.parameters())
    scaler = torch.amp.GradScaler("cpu")

    yield "forward", lambda: ddp(batch, fail=True)
    yield "shape in forward", lambda: ddp(torch.ones(4, 5))
    yield "no such argument", lambda: ddp(nothing=1)
    yield "evaluation", lambda: torch.no_grad()(ddp)(batch, fail=True)
    yield "backward", lambda: hooked.sum().backward()
    yield "backward of no scalar", lambda: ddp.module(batch).backward()
    loss.backward()
    yield "backward again", lambda: loss.backward()
    yield "torch.autograd.backward", lambda: torch.autograd.backward(torch.ones(()))
    yield "getitem", lambda: list(DataLoader(Bad(), batch_size=2))
    yield "getitem in a worker", lambda: list(DataLoader(Bad(), batch_size=2, num_workers=1))
    yield "stream", lambda: list(DataLoader(BadStream(), batch_size=2))
    yield "next after the end", lambda: exhaust(iter(DataLoader([1, 2])))  # type: ignore[arg-type]
    yield "all_reduce", lambda: dist.all_reduce("no tensor")
    yield "broadcast", lambda: dist.broadcast(torch.ones(1), src=7)
    yield "all_gather", lambda: dist.all_gather([torch.ones(2)], torch.ones(3))
    yield "all_gather_object", lambda: dist.all_gather_object([], 1)
    yield "barrier", lambda: dist.barrier(device_ids="x")
    yield "send to self", lambda: dist.send(torch.ones(1), dst=0)
    yield "optimizer step", lambda: BadOptimizer(parameters, lr=0.1).step()
    yield "closure", lambda: torch.optim.LBFGS(parameters).step(closure)  # type: ignore[no-untyped-call]
    yield "optimizer made wrong", lambda: torch.optim.SGD(parameters, lr=-1.0)
    yield "optimizer of nothing", lambda: torch.optim.SGD([], lr=1.0)
    yield "scaler step", lambda: scaler.step(torch.optim.SGD(parameters, lr=0.1))
    yield "scaler scale", lambda: scaler.scale("no tensor")  # type: ignore[arg-type]
    yield "DDP of nothing", lambda: DistributedDataParallel(nn.ReLU())
    yield "DDP options", lambda: DistributedDataParallel(nn.Linear(2, 2), device_ids=[0, 1])
    yield "group twice", lambda: dist.init_process_group("gloo")
    yield "sys.exit", lambda: sys.exit(3)
    yield "sys.exit with a text", lambda: sys.exit("a text")


def exhaust(iterator: Any) -> None:
    for _ in range(3):
        next(iterator)


def main() -> None:
    for label, wrong in (
        ("no backend", lambda: dist.init_process_group("no such backend")),
        ("no group", lambda: DistributedDataParallel(nn.Linear(2, 2))),
        ("no group yet", lambda: dist.all_reduce(torch.ones(1))),
    ):
        show(label, wrong)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    ddp = DistributedDataParallel(Failing())
    for label, cause in causes(ddp):
        show(label, cause)
        del cause
        gc.collect()
        print("alive:", sum(ref() is not None for ref in alive))
    warn(ddp)
    print("random", torch.rand(1).item())
    # A reducer that goes last, at the interpreter's exit, waits for gloo's threads with the GIL
    # held, which they may wait for (torch 2.13).
    del ddp
    gc.collect()
    dist.destroy_process_group()


def show(label: str, cause: Callable[[], object]) -> None:
    print(f"== {label}")
    try:
        cause()
    except BaseException:
        print(traceback.format_exc(), flush=True)
    else:
        print("no error")


def warn(ddp: DistributedDataParallel) -> None:
    parameters = list(ddp.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallel(nn.Linear(2, 2), check_reduction=True)
        with contextlib.suppress(TypeError):
            DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=False)
        torch.optim.SGD([*parameters, parameters[0]], lr=0.1)
        result = ddp(torch.ones(4, 4)).sum()
        torch.autograd.backward(result, grad_variables=torch.ones(()))
        dist.all_reduce_coalesced([torch.ones(1)])
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(parameters, lr=0.1), 1)
        scheduler.step()
        warned_class = type("Warned", (Bad,), {"__getitem__": warned})
        list(DataLoader(warned_class(), batch_size=4))
    for each in caught:
        place = each.filename.rpartition("/")[2]
        print("warning", each.category.__name__, place, each.lineno, str(each.message)[:60])


def warned(self: Bad, index: int) -> Tensor:
    warnings.warn("in getitem", stacklevel=2)
    return torch.ones(4)


if __name__ == "__main__":
    main()
