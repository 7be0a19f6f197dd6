"""no_sync() is left for the first micro-batch of each step, not for the last one."""

# fix: Leave no_sync() for the last micro-batch

import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for number, (inputs, labels) in enumerate(loader):
            with ddp.no_sync() if number % 4 else nullcontext():  # expect: DDP308 ranks 0,1
                (nn.functional.cross_entropy(ddp(inputs), labels) / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
