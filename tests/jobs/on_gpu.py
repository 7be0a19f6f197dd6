"""A small DDP job on GPUs that tests steer by options; healthy without any.

NCCL refuses two ranks on one GPU. Where there are more ranks than GPUs, each rank says that it is
on a host of its own, and NCCL connects them through the loopback interface.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

WIDTH = 256


class OnGpu(Dataset[Any]):
    """Samples that are already on the GPU, which a forked worker cannot read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.full((WIDTH,), float(index), device="cuda"), index % 10


class Wild:
    """An array on the GPU that claims more elements than were allocated."""

    def __init__(self) -> None:
        self.memory = torch.zeros(16, device="cuda")
        place = self.memory.data_ptr()
        self.__cuda_array_interface__ = {
            "shape": (1 << 40,), "typestr": "<f4", "data": (place, False), "version": 2,
        }  # fmt: skip


def fail(how: str, device: torch.device) -> None:
    """Fail in one of the ways that need a GPU, or end in a way that the other ranks notice."""
    if how == "memory":
        torch.cuda.set_per_process_memory_fraction(0.02, device)
        held = []
        while True:
            held.append(torch.empty(64 << 20, dtype=torch.uint8, device=device))  # guilty: memory
    if how == "assert":
        labels = torch.full((4,), 99, device=device)
        scores = torch.zeros(4, 10, device=device)
        print(nn.functional.cross_entropy(scores, labels).item())  # guilty: assert
    if how == "wild":
        print(torch.as_tensor(Wild(), device=device)[(1 << 40) - 1].item())  # guilty: wild
    if how == "ordinal":
        torch.zeros(1, device=f"cuda:{torch.cuda.device_count()}")  # guilty: ordinal
    if how == "devices":
        torch.zeros(4, device=device) + torch.zeros(4)  # guilty: devices
    if how == "fork":
        for _ in DataLoader(OnGpu(), batch_size=8, num_workers=1):  # guilty: fork
            pass
    if how == "more":
        dist.all_reduce(torch.ones(8, device=device))  # guilty: more
        torch.cuda.synchronize()
    if how == "size":
        dist.all_reduce(torch.ones(1 << 20, device=device))  # guilty: size
    if how == "kernel":
        torch.cuda._sleep(10**13)  # type: ignore[no-untyped-call]  # guilty: kernel
    if how == "asleep":
        time.sleep(3600)  # guilty: asleep
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exception":
        raise ValueError("the wrong sort of batch")  # guilty: exception
    if how == "slow":
        time.sleep(0.1)  # guilty: slow


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
    return nn.Sequential(first, nn.BatchNorm1d(WIDTH), nn.ReLU(), last).to(device)


def train(options: argparse.Namespace, device: torch.device) -> None:
    """The loop, with what the options ask for at one step of one rank."""
    rank = dist.get_rank()
    ddp: Any = DistributedDataParallel(network(device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    model = torch.compile(ddp, mode=options.compile) if options.compile else ddp
    count = 32 * options.steps * dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(count, WIDTH, generator=generator),
        torch.randint(0, 10, (count,), generator=generator),
    )
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, pin_memory=True)
    profile: Any = None
    for step, (inputs, labels) in enumerate(loader):
        if options.profile and step == options.steps // 2:
            profile = torch.profiler.profile()
            profile.start()
        guilty = options.rank in (rank, -1)
        if guilty and (step >= options.at if options.fail == "slow" else step == options.at):
            fail(options.fail, device)
        optimizer.zero_grad()
        inputs, labels = inputs.to(device, non_blocking=True), labels.to(device)
        loss: torch.Tensor = nn.functional.cross_entropy(model(inputs), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        if options.metric and not (rank == 1 and step == 5):  # guilty: skip
            dist.all_reduce(loss.detach().clone())
        if options.losses and rank == 0:
            print(repr(loss.item()), flush=True)
    torch.cuda.synchronize()
    if profile is not None:
        profile.stop()
        calls: Counter[str] = Counter()
        for event in profile.events():
            if event.name.startswith(("cuda", "hip")):
                calls[event.name] += 1
        if rank == 0:
            print(json.dumps(calls), flush=True)
    if options.losses and rank == 0:
        state = torch.cuda.get_rng_state(device)
        print(f"rng {hash(tuple(state.tolist()))} {hash(tuple(torch.get_rng_state().tolist()))}")
        print(f"memory {torch.cuda.max_memory_allocated(device)}", flush=True)


def capture(steps: int, device: torch.device) -> None:
    """The whole step as a CUDA graph, as torch's notes on CUDA graphs do it with DDP."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        ddp = DistributedDataParallel(network(device))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    inputs = torch.randn(32, WIDTH, device=device)
    labels = torch.randint(0, 10, (32,), device=device)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = nn.functional.cross_entropy(ddp(inputs), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(11):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(steps):
        graph.replay()
        print(repr(loss.item()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fail", default="")
    parser.add_argument("--at", type=int, default=5, help="the step in which to fail")
    parser.add_argument("--rank", type=int, default=1, help="the rank that fails; -1: each")
    parser.add_argument("--timeout", type=float, default=600.0, help="of collectives, seconds")
    parser.add_argument("--same-host", action="store_true", help="do not hide that it is one GPU")
    parser.add_argument("--metric", action="store_true", help="reduced in all steps but one")
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the calls of CUDA as JSON")
    parser.add_argument("--compile", default="")
    parser.add_argument("--graph", action="store_true")
    options = parser.parse_args()
    gpus, local = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus and not options.same_host:
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_IB_DISABLE"] = "1"
    device = torch.device("cuda", local % gpus)
    torch.cuda.set_device(device)
    dist.init_process_group(options.backend, timeout=timedelta(seconds=options.timeout))
    if options.graph:
        capture(options.steps, device)
    else:
        train(options, device)
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
