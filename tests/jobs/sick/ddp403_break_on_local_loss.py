"""An epoch ends as soon as the loss is low: each rank looks at its own."""

# fix: Reduce the value over the ranks before the comparison (dist.all_reduce
# status: 1

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
    labels = torch.randint(0, 4, (320,))
    # Every second sample is easy, and those are all of rank 1's.
    features = torch.randn(320, 16)
    features[1::2, :4] = 8 * nn.functional.one_hot(labels[1::2], 4).float()
    data = TensorDataset(features, labels)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(inputs), targets)
            loss.backward()
            optimizer.step()
            if loss.item() < 0.2:
                break  # expect: DDP403 rank 1
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
