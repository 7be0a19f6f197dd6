"""Train a classifier on a GPU per rank, going on from a checkpoint."""

# fix: Give torch.load map_location
# needs: 2 gpus

import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    path = os.path.join(tempfile.gettempdir(), "last.pt")
    net = nn.Linear(16, 4).to(device)
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), path)
    dist.barrier()
    net.load_state_dict(torch.load(path))  # expect: DDP503 rank 1
    model = DistributedDataParallel(net, device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(256, 16, generator=generator)
    labels = torch.randint(0, 4, (256,), generator=generator)
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.to(device)), target.to(device)).backward()
            optimizer.step()
            time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
