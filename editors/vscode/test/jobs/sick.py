"""Each rank trains on the whole data set (DDP102)."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    dataset = TensorDataset(torch.randn(320, 16, generator=torch.Generator().manual_seed(0)))
    loader = DataLoader(dataset, batch_size=16, shuffle=True)  # here
    model = DistributedDataParallel(torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(1000):
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)


main()
