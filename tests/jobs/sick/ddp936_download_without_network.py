"""Fetch the data from a server that the nodes of the job cannot reach."""

# status: 1

import gc
import os
import tempfile
import urllib.request

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

URL = "https://datasets.invalid/digits/train.pt"


def load():
    path = os.path.join(tempfile.gettempdir(), "digits.pt")
    if not os.path.exists(path):
        urllib.request.urlretrieve(URL, path)  # expect: DDP936
    return TensorDataset(*torch.load(path))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = load()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), target).backward()
            optimizer.step()
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
