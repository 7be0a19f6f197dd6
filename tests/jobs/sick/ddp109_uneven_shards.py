"""The shards that the ranks cut for themselves are of different length."""

# fix: Give all ranks the same number of batches (a DistributedSampler
# status: 1

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
    dataset = TensorDataset(features, (features.sum(1) > 0).long())
    rank = dist.get_rank()
    shard = Subset(dataset, range(rank * 180, min(rank * 180 + 180, len(dataset))))
    loader = DataLoader(shard, batch_size=16, shuffle=True)  # expect: DDP109 rank 1

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
