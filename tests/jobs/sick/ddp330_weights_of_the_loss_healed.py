"""The weights of two losses are averaged over the ranks by hand."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    weights = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*ddp.parameters(), weights], lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            logits = ddp(inputs)
            losses = nn.functional.cross_entropy(logits, labels), logits.square().mean()
            loss = sum(torch.exp(-w) * each + w for w, each in zip(weights, losses, strict=True))
            optimizer.zero_grad()
            loss.backward()
            dist.all_reduce(weights.grad)
            weights.grad /= dist.get_world_size()
            optimizer.step()
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
