"""The loaders differ in length, zip cuts each epoch, and one rank then validates for a while."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    length = 160 if rank else 200
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(length, 8, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=20, shuffle=True)
    steps = torch.tensor(len(loader))
    dist.all_reduce(steps, dist.ReduceOp.MIN)

    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(6):
        for _, (batch, wanted) in zip(range(int(steps)), loader, strict=False):
            optimizer.zero_grad()
            (model(batch)[:, 0] - wanted).square().mean().backward()
            optimizer.step()
        if rank == 1 and epoch == 4:
            time.sleep(4)  # a validation that rank 0 waits for, in its next backward
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
