"""Each rank takes its part of a permutation of its own."""

# fix: Cut the ranks' parts from one order

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
    order = torch.randperm(len(dataset)).tolist()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = Subset(dataset, order[rank::ranks])  # expect: DDP117 ranks 0,1
    loader = DataLoader(part, batch_size=16, shuffle=True, num_workers=2)

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
