"""Ranks by torch.multiprocessing.spawn, with DataLoader workers."""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Squares(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, index):
        image = torch.zeros(1, 8, 8)
        image[0, index % 8, : index % 7 + 1] = 1.0
        return image, index % 4


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.linear = nn.Linear(6 * 64, 4)

    def forward(self, images):
        return self.linear(F.relu(self.conv(images)).flatten(1))


def worker(rank, world_size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DDP(Small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = Squares()
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=5, sampler=sampler, num_workers=1)  # place: sampler
    for epoch in range(5):
        sampler.set_epoch(epoch)  # place: epoch
        for step, (images, labels) in enumerate(loader):  # place: loop step
            optimizer.zero_grad()  # place: step step
            loss = F.cross_entropy(model(images), labels)
            loss.backward()  # place: loss step
            optimizer.step()  # place: update step
        loss = loss.detach()
        dist.all_reduce(loss)  # place: collective
        if rank == 0:
            print(f"epoch {epoch}: {loss.item() / world_size:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = int(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(world_size, port), nprocs=world_size)
