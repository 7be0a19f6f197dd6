"""Train on a data set that opens a file per sample and keeps it open."""

import gc
import resource

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        with open(__file__) as file:
            file.read(1)
        return torch.randn(16), index % 4


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Images()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # What many systems have; the rest of this job takes some of it.
    limit = 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
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
