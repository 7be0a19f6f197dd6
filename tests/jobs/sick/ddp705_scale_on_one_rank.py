"""Mixed precision that goes on from a checkpoint: rank 0 alone takes over the scale."""

# fix: Create the scaler with the same arguments

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    checkpoint = {**scaler.state_dict(), "scale": 256.0}
    if dist.get_rank() == 0:
        scaler.load_state_dict(checkpoint)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu"):
                loss = nn.functional.cross_entropy(ddp(inputs), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # expect: DDP705
            scaler.update()
    del ddp, optimizer, scaler, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
