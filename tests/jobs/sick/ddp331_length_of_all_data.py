"""The schedule is as long as an epoch over all the data, of which each rank takes a half."""

# fix: Compute the length from the steps that a rank takes: epochs * len(loader), with

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, 3 * len(data) // 16)  # expect: DDP331 ranks 0,1
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(inputs), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
