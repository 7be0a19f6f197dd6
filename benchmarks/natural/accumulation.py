"""Gradient accumulation with no_sync, clipping and validation in between."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

ACCUMULATE = 2


def build():
    body = [nn.Linear(18, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4)]
    return DistributedDataParallel(nn.Sequential(*body), gradient_as_bucket_view=True)


def validate(model, loader, rank):
    model.eval()
    with torch.inference_mode():
        sums = [nn.functional.cross_entropy(model.module(x), y) for x, y in loader]
    model.train()
    mean = torch.stack(sums).mean()
    dist.all_reduce(mean)  # place: collective
    return mean.item() / dist.get_world_size()


def run(rank):
    torch.manual_seed(5)
    size = 128 * dist.get_world_size()
    data = TensorDataset(torch.randn(size, 18), torch.randint(4, (size,)))
    training, validation = random_split(data, [0.75, 0.25])
    loader = DataLoader(training, 8, sampler=DistributedSampler(training))  # place: sampler
    held_out = DataLoader(validation, 8, sampler=DistributedSampler(validation, shuffle=False))
    model = build()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(8):
        loader.sampler.set_epoch(epoch)  # place: epoch
        for step, (x, y) in enumerate(loader):  # place: loop step
            last = (step + 1) % ACCUMULATE == 0  # place: step step
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(x), y) / ACCUMULATE
                loss.backward()  # place: loss step
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # place: update step//ACCUMULATE
                optimizer.zero_grad()
        value = validate(model, held_out, rank)
        if rank == 0:
            print(f"epoch {epoch}: validation loss {value:.4f}")


dist.init_process_group("gloo")
try:
    run(dist.get_rank())
finally:
    dist.destroy_process_group()
