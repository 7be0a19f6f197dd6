"""Training loops of every kind, one after the other in one process per rank.

``loops.py DIRECTORY NAME...`` runs the named loops. Rank 0 prints their losses; each rank writes
into DIRECTORY when each loop began and ended, so that a test can tell whose steps are whose.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

PAUSE = 0.04
"""Seconds of every injected sleep."""

LONG = 0.4
"""Seconds that an evaluation takes."""

LOOPS: dict[str, Callable[[], None]] = {}
losses: list[float] = []


def loop(function: Callable[[], None]) -> Callable[[], None]:
    LOOPS[function.__name__] = function
    return function


def batches(count: int = 5, size: int = 4) -> DataLoader[tuple[Tensor, ...]]:
    """A loader of ``count`` batches, the last one two samples short."""
    data = torch.randn(count * size - 2, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(data), batch_size=size)


class Sleeper(nn.Module):
    """A linear layer that sleeps in its forward."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.pause = pause

    def forward(self, batch: Tensor) -> Any:
        time.sleep(self.pause)
        return self.layer(batch)


def model(pause: float = 0.0) -> DistributedDataParallel:
    torch.manual_seed(1)
    return DistributedDataParallel(Sleeper(pause))


def sgd(ddp: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(ddp.parameters(), lr=0.1)


def note(loss: Tensor) -> Any:
    losses.append(loss.item())
    return loss


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> None:
    for (batch,) in data:
        optimizer.zero_grad()
        note(ddp(batch).square().mean()).backward()
        optimizer.step()


# -- how steps are counted


@loop
def plain() -> None:
    ddp = model()
    train(ddp, sgd(ddp), batches())


def accumulate(synchronized: bool) -> None:
    ddp = model()
    optimizer = sgd(ddp)
    for number, (batch,) in enumerate(batches(6), 1):
        last = number % 3 == 0
        with contextlib.nullcontext() if last or synchronized else ddp.no_sync():
            note(ddp(batch).square().mean()).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


@loop
def accumulation_with_no_sync() -> None:
    accumulate(synchronized=False)


@loop
def accumulation_with_sync() -> None:
    accumulate(synchronized=True)


@loop
def accumulation_without_a_loader() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    for _ in range(4):
        for _ in range(3):
            note(ddp(torch.ones(4, 8)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop
def without_a_loader() -> None:
    ddp = model()
    train(ddp, sgd(ddp), [(torch.ones(4, 8),)] * 5)


@loop
def keyword_inputs() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    for _ in range(4):
        optimizer.zero_grad()
        note(ddp(batch=torch.ones(4, 8)).square().mean()).backward()
        optimizer.step()


@loop
def two_optimizers() -> None:
    generator, critic = model(), model()
    first, second = sgd(critic), sgd(generator)
    for (batch,) in batches():
        first.zero_grad()
        note(critic(batch).square().mean()).backward()
        first.step()
        second.zero_grad()
        note(generator(batch).square().mean()).backward()
        second.step()


@loop
def two_losses() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    for (batch,) in batches():
        optimizer.zero_grad()
        out = ddp(batch)
        with ddp.no_sync():
            out[:, 0].mean().backward(retain_graph=True)
        note(out[:, 1].square().mean()).backward()
        optimizer.step()


@loop
def optimizer_state_made_for_a_checkpoint() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    get_state_dict(ddp, optimizer)
    train(ddp, optimizer, batches())


@loop
def optimizer_recreated() -> None:
    ddp = model()
    for (batch,) in batches():
        optimizer = sgd(ddp)
        optimizer.zero_grad()
        note(ddp(batch).square().mean()).backward()
        optimizer.step()


@loop
def optimizer_recreated_with_a_scheduler() -> None:
    # A scheduler and its optimizer refer to each other: the garbage collector decides when they go.
    ddp = model()
    for _ in range(3):
        optimizer = sgd(ddp)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        train(ddp, optimizer, batches())
        scheduler.step()


@loop
def two_stages() -> None:
    ddp = model()
    first, second = sgd(ddp), sgd(ddp)
    train(ddp, first, batches())
    train(ddp, second, batches())


class Outer(torch.optim.Optimizer):
    """An optimizer around another one, as sharded and averaging optimizers are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@loop
def optimizer_in_an_optimizer() -> None:
    ddp = model()
    train(ddp, Outer(sgd(ddp)), batches())


@loop
def lbfgs() -> None:
    ddp = model()
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=3)
    for (batch,) in batches():

        def closure(batch: Tensor = batch) -> Any:
            optimizer.zero_grad()
            loss = note(ddp(batch).square().mean())
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]


class Checkpointed(nn.Module):
    """Recomputes its inside in the backward, which calls backward within backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, batch: Tensor) -> Any:
        hidden: Tensor = checkpoint(self.first, batch.requires_grad_(), use_reentrant=True)
        return self.second(hidden)


@loop
def reentrant_checkpoint() -> None:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(Checkpointed())
    train(ddp, sgd(ddp), batches())


@loop
def amp() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, (batch,) in enumerate(batches()):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = note(ddp(batch).float().square().mean())
        scaler.scale(loss).backward()
        if number == 2:
            next(ddp.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()


@loop
def amp_switched_off() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for (batch,) in batches():
        optimizer.zero_grad()
        scaler.scale(note(ddp(batch).square().mean())).backward()
        scaler.step(optimizer)
        scaler.update()


@loop
def epochs() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    data = TensorDataset(torch.ones(16, 8))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(3, 6):
        sampler.set_epoch(epoch)
        train(ddp, optimizer, loader)


@loop
def loader_workers() -> None:
    ddp = model()
    data = TensorDataset(torch.ones(18, 8))
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
    train(ddp, sgd(ddp), loader)


@loop
def spawned_loader_workers() -> None:
    ddp = model()
    data = TensorDataset(torch.ones(18, 8))
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="spawn")
    train(ddp, sgd(ddp), loader)


class Named(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "image": torch.ones(8)}


@loop
def dictionaries() -> None:
    ddp = model()
    images = ((batch["image"],) for batch in DataLoader(Named(), batch_size=4))
    train(ddp, sgd(ddp), images)


# -- evaluation between and within epochs


@torch.no_grad()
def evaluate(module: nn.Module, data: Any) -> None:
    module.eval()
    for (batch,) in data:
        time.sleep(LONG / 5)
        module(batch)
    module.train()


@loop
def evaluation_with_ddp() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    for _ in range(2):
        train(ddp, optimizer, batches())
        evaluate(ddp, batches())


@loop
def evaluation_with_the_module() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    for _ in range(2):
        train(ddp, optimizer, batches())
        evaluate(ddp.module, batches())


@loop
def evaluation_within_an_epoch() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    for number, batch in enumerate(batches()):
        train(ddp, optimizer, [batch])
        if number == 2:
            evaluate(ddp.module, batches())


@loop
def evaluation_within_an_epoch_cut_short() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    for number, batch in enumerate(batches()):
        train(ddp, optimizer, [batch])
        if number == 2:
            evaluate(ddp.module, itertools.islice(batches(20), 5))


# -- errors that the job catches and survives


class Moody(torch.optim.SGD):
    """An optimizer whose second step fails."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.count == 2:
            raise RuntimeError("not now")
        return super().step(closure)


@loop
def optimizer_fails_once() -> None:
    ddp = model()
    optimizer = Moody(ddp.parameters(), lr=0.1)
    for batch in batches(6):
        with contextlib.suppress(RuntimeError):
            train(ddp, optimizer, [batch])
        time.sleep(PAUSE)


@loop
def backward_fails_once() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    for number, (batch,) in enumerate(batches(6)):
        if number == 1:
            with contextlib.suppress(RuntimeError):
                torch.autograd.backward(torch.ones(()))
        train(ddp, optimizer, [(batch,)])
        time.sleep(PAUSE)


# -- where time goes


class Late(Dataset[tuple[Tensor]]):
    """Each batch of four is ``PAUSE`` late."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor]:
        time.sleep(PAUSE / 4)
        return (torch.ones(8),)


@loop
def slow_data() -> None:
    ddp = model()
    train(ddp, sgd(ddp), DataLoader(Late(), batch_size=4))


@loop
def slow_forward() -> None:
    ddp = model(PAUSE)
    train(ddp, sgd(ddp), batches(8))


@loop
def slow_backward_of_rank_0() -> None:
    ddp = model()
    if dist.get_rank() == 0:
        ddp.module.layer.weight.register_hook(lambda grad: time.sleep(PAUSE))
    train(ddp, sgd(ddp), batches(8))


class Lazy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(PAUSE)
        return super().step(closure)


@loop
def slow_optimizer() -> None:
    ddp = model()
    train(ddp, Lazy(ddp.parameters(), lr=0.1), batches(8))


@loop
def slow_other() -> None:
    ddp = model()
    optimizer = sgd(ddp)
    for batch in batches(8):
        time.sleep(PAUSE)
        train(ddp, optimizer, [batch])


def slow_before(collective: Callable[[], object]) -> None:
    """Rank 0 comes late to a collective in every step."""
    ddp = model()
    optimizer = sgd(ddp)
    for batch in batches(8):
        train(ddp, optimizer, [batch])
        if dist.get_rank() == 0:
            time.sleep(PAUSE)
        collective()


@loop
def slow_rank_0_before_a_barrier() -> None:
    slow_before(dist.barrier)


@loop
def slow_rank_0_before_an_asynchronous_collective() -> None:
    slow_before(lambda: dist.all_reduce(torch.ones(1), async_op=True).wait())


# -- no optimizer: run these in a job of their own


@torch.no_grad()
def descend(ddp: nn.Module) -> None:
    for parameter in ddp.parameters():
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None


def descent(data: Any) -> None:
    ddp = model()
    for (batch,) in data:
        note(ddp(batch).square().mean()).backward()
        descend(ddp)


@loop
def inference() -> None:
    ddp = model()
    with torch.no_grad():
        for (batch,) in batches():
            note(ddp(batch).mean())


@loop
def inference_mode_without_a_loader() -> None:
    ddp = model()
    with torch.inference_mode():
        for _ in range(5):
            note(ddp(torch.ones(4, 8)).mean())


@loop
def manual_descent() -> None:
    descent(batches())


@loop
def manual_descent_without_a_loader() -> None:
    descent([(torch.ones(4, 8),)] * 5)


def windows(directory: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        losses.clear()
        began = time.time_ns()
        LOOPS[name]()
        ended = time.time_ns()
        if dist.get_rank() == 0:
            sys.stdout.write(" ".join([name, *map(repr, losses)]) + "\n")
        gc.collect()
        dist.barrier()
        yield {"name": name, "began": began, "ended": ended, "losses": [*losses]}


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")
    found = list(windows(directory, names))
    (directory / f"windows-{dist.get_rank()}.json").write_text(json.dumps(found))
    sys.stdout.write(f"rng {dist.get_rank()} {torch.randint(1 << 30, ())}\n")
    sys.stdout.flush()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
