"""After training each rank writes the predictions of its own shard to a file of its own."""

import gc
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(320, 16, generator=generator)
    dataset = TensorDataset(features, (features.sum(1) > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    unseen = Subset(dataset, range(64))
    shard = DistributedSampler(unseen, shuffle=False)
    parts = DataLoader(unseen, batch_size=16, sampler=shard)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    predictions: list[torch.Tensor] = []
    with torch.no_grad():
        for inputs, _ in parts:
            predictions.append(model.module(inputs).argmax(1))
    file = Path(tempfile.gettempdir(), f"predictions-{dist.get_rank()}.pt")
    torch.save(torch.cat(predictions), file)
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
