"""Fine-tuning that rolls back to its best weights; they are only on rank 0, so only it does."""

# fix: Do it on every rank, or before DistributedDataParallel

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    best = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
        if epoch == 1 and dist.get_rank() == 0:
            ddp.module.load_state_dict(best)  # expect: DDP319 rank 0
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
