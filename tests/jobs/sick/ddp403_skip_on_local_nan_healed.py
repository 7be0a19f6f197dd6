"""A batch whose loss is not a number on any rank is skipped on all."""

import datetime
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
    torch.manual_seed(0)
    features = torch.randn(256, 16)
    # A damaged sample, the shard of rank 1.
    features[77] = float("nan")
    data = TensorDataset(features, (features.sum(1) > 0).long())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(inputs), targets)
            bad = torch.isnan(loss).float()
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            if bad.item():
                continue
            loss.backward()
            optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
