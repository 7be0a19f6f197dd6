"""Accumulate gradients over two batches."""

# fix: Put the forward into the no_sync() block

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (batch, target) in enumerate(loader):
            last = number % 2 == 1
            loss = nn.functional.cross_entropy(model(batch), target) / 2
            if last:
                loss.backward()
            else:
                with model.no_sync():
                    loss.backward()  # expect: DDP308
            if last:
                optimizer.step()
                optimizer.zero_grad()
    del model, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
