"""The accuracies of shards that differ in size are averaged."""

# fix: all_reduce the sums and counts, and compute the metric from these

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    test = TensorDataset(torch.randn(203, 16), torch.randint(0, 4, (203,)))
    mine = Subset(test, range(dist.get_rank(), len(test), dist.get_world_size()))
    held_out = DataLoader(mine, batch_size=16)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
        right, count = torch.tensor(0.0), 0
        with torch.no_grad():
            for inputs, labels in held_out:
                right += (ddp.module(inputs).argmax(1) == labels).sum()
                count += len(labels)
        accuracy = right / count  # or: DDP106
        dist.all_reduce(accuracy)  # expect: DDP106
        accuracy /= dist.get_world_size()  # or: DDP106
        if dist.get_rank() == 0:
            print(f"accuracy {accuracy.item():.3f}")
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
