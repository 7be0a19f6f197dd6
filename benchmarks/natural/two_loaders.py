"""Semi-supervised training: a labelled and an unlabelled loader, drawn side by side."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    return dist.get_rank(), dist.get_world_size()


def loaders(world_size):
    labelled = TensorDataset(torch.randn(64 * world_size, 12), torch.randint(3, (64 * world_size,)))
    unlabelled = TensorDataset(torch.randn(192 * world_size, 12))
    first, second = DistributedSampler(labelled), DistributedSampler(unlabelled, seed=1)
    return (
        DataLoader(labelled, batch_size=8, sampler=first, drop_last=True),  # place: sampler
        DataLoader(unlabelled, batch_size=24, sampler=second, drop_last=True),
    )


def consistency(model, inputs):
    noisy = model(inputs + 0.1 * torch.randn_like(inputs))
    return F.mse_loss(noisy.softmax(dim=1), torch.full_like(noisy, 1 / 3))


def main():
    rank, world_size = setup()
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3)), static_graph=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    labelled, unlabelled = loaders(world_size)
    for epoch in range(5):
        labelled.sampler.set_epoch(epoch)  # place: epoch
        unlabelled.sampler.set_epoch(epoch)
        pairs = zip(labelled, unlabelled, strict=False)
        for step, ((inputs, targets), (more,)) in enumerate(pairs):  # place: loop step
            both = torch.cat([inputs, more])  # place: step step
            outputs = model(both)
            loss = F.cross_entropy(outputs[: len(inputs)], targets)
            loss = loss + 0.1 * outputs[len(inputs) :].pow(2).mean()
            optimizer.zero_grad()
            loss.backward()  # place: loss step
            optimizer.step()  # place: update step
        schedule.step()
        report = torch.tensor([loss.item(), float(len(labelled))])
        dist.all_reduce(report)  # place: collective
        if rank == 0:
            print(f"{epoch=} loss {report[0].item() / world_size:.3f}", flush=True)
    dist.destroy_process_group()


main()
