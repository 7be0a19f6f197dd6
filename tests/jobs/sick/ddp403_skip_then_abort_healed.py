"""All ranks skip the batch that one of them cannot train on."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(96, 16)
    inputs[25] = float("nan")
    data = TensorDataset(inputs, torch.randn(96, 4))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step, (batch, targets) in enumerate(loader):
        loss = (ddp(batch) - targets).square().mean()
        bad = (~torch.isfinite(loss)).float()
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad > 0:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
