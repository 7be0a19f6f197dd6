"""The learning rate grows with the batch of all ranks."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    batch_size = 16
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    lr = 0.05 * batch_size * dist.get_world_size() / 256
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
