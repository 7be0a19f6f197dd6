"""Go on from a checkpoint that the wrapper was saved to, with strict=False."""

# fix: Strip the prefix

import gc
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def train(model, data):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), target).backward()
            optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    path = os.path.join(tempfile.gettempdir(), "model.pt")
    model = DistributedDataParallel(build())
    train(model, data)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)  # expect: DDP502 rank 0
    dist.barrier()
    again = build()
    again.load_state_dict(torch.load(path), strict=False)  # expect: DDP509 ranks 0,1
    again = DistributedDataParallel(again)
    train(again, data)
    del model, again
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
