"""Train a classifier and keep the weights of the wrapper."""

# fix: Save `model.module.state_dict()`

import gc
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, labels = torch.randn(256, 16), torch.randint(0, 4, (256,))
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = tempfile.gettempdir()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), target).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            path = os.path.join(folder, "model.pt")
            torch.save({"epoch": epoch, "model": model.state_dict()}, path)  # expect: DDP502 rank 0
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
