"""One seed on all ranks: they draw the same batches, and drop the last."""

# ranks: 3

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(330, 16, generator=generator)
    dataset = TensorDataset(features, (features.sum(1) > 0).long())
    loader = DataLoader(dataset, 16, shuffle=True, num_workers=1, drop_last=True)  # expect: DDP102

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
