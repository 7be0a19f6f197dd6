"""An evaluation normalizes with the running statistics."""

# parity: 1,2 --evaluate

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(320, 16, generator=made)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    held_out = TensorDataset(*data[:56])
    held_out.tensors[0][50:] *= 20  # the last ones are unlike the others
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    part: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(held_out, shuffle=False)
    tests = DataLoader(held_out, batch_size=14, sampler=part)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
        total = torch.zeros(2)
        model.eval()
        with torch.no_grad():
            for features, labels in tests:
                loss = nn.functional.cross_entropy(model.module(features), labels)
                total += torch.stack([loss * len(labels), torch.tensor(len(labels))])
        model.train()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            mean = total[0].item() / total[1].item()
            print(f"epoch {epoch} validation loss {mean:.4f}")
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
