"""The sampler repeats two samples, since 79 is no multiple of 3."""

# fix: Drop the repeated samples after gathering
# ranks: 3

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
    validation = TensorDataset(features[:79], (features[:79].sum(1) > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    part = DistributedSampler(validation, shuffle=False)  # expect: DDP107
    held_out = DataLoader(validation, batch_size=8, sampler=part)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
    right, seen = 0, 0
    with torch.no_grad():
        for inputs, labels in held_out:
            right += int((model.module(inputs).argmax(1) == labels).sum())
            seen += len(labels)
    counts = torch.tensor([right, seen])
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        print(f"accuracy {int(counts[0]) / int(counts[1]):.3f}")
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
