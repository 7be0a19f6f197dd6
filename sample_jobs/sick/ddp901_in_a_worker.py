"""Look up a label that there is not, in a worker of the loader."""

# fix: Fix this exception first; failures
# status: 1

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LABELS = {"cat": 0, "dog": 1, "bird": 2, "fish": 3}
NAMES = ("cat", "dog", "bird", "fish")


class Pictures(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        name = NAMES[index % 4] if index != 41 else "horse"
        return torch.full((16,), index / 64), LABELS[name]  # expect: DDP901


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Pictures()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=1)
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
