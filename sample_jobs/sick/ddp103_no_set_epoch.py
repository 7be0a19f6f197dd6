"""The sampler is never told the epoch."""

# fix: Call set_epoch(epoch) with the epoch's number

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(320, 16, generator=generator)
    dataset = TensorDataset(features, (features.sum(1) > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, labels in loader:  # expect: DDP103 ranks 0,1
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
