"""The folds lie side by side."""

# ranks: 3

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(320, 16, generator=generator)
    labels = (features.sum(1) > 0).long()
    dataset = TensorDataset(features, labels)
    fold = len(dataset) // dist.get_world_size()
    begin = dist.get_rank() * fold
    mine = [index % len(dataset) for index in range(begin, begin + fold)]
    part = Subset(dataset, mine)
    loader = DataLoader(part, batch_size=16, shuffle=True)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
