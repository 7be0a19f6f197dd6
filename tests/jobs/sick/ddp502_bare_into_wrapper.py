"""Train a classifier, then go back to the last checkpoint."""

# fix: The checkpoint came from a bare model
# status: 1

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


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    path = os.path.join(tempfile.gettempdir(), "model.pt")
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), target).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path))  # expect: DDP502
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
