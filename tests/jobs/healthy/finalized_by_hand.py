"""End each backward by hand where torch lets one (2.15), so that other work overlaps with it."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    by_hand = hasattr(model, "finalize_backward")
    if by_hand:
        model.require_manual_backward_finalization = True
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seen = torch.zeros(1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            seen += loss.detach()
            if by_hand:
                model.finalize_backward()
            optimizer.step()
    del model, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
