"""Each rank evaluates its shard with running statistics of its own."""

# fix: Broadcast the buffers from one rank

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    features = torch.randn(320, 16) * torch.linspace(0.5, 2, 320)[:, None]
    dataset = TensorDataset(features, (features.sum(1) > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    part = DistributedSampler(dataset, shuffle=False)
    held_out = DataLoader(dataset, batch_size=32, sampler=part)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
        ddp.eval()
        counts = torch.zeros(2)
        with torch.no_grad():
            for inputs, labels in held_out:  # expect: DDP708 ranks 0,1
                counts += torch.tensor([(ddp(inputs).argmax(1) == labels).sum(), len(labels)])
        dist.all_reduce(counts)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {counts[0] / counts[1]:.3f}", flush=True)
        ddp.train()
    del ddp, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
