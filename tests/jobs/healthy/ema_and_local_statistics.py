"""Running statistics of each rank's own, an average of the weights on rank 0, which also logs."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    held_out = DataLoader(data, batch_size=64)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    average = AveragedModel(model) if dist.get_rank() == 0 else None
    best = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(inputs), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            if average is not None:
                average.update_parameters(model)
        model.eval()
        with torch.no_grad():
            right = [(ddp(inputs).argmax(1) == labels).sum() for inputs, labels in held_out]
        model.train()
        if dist.get_rank() == 0:
            best.load_state_dict(model.state_dict())
            print(f"epoch {epoch}: loss {loss.item():.3f}, {sum(right)} right", flush=True)
    del ddp, optimizer, schedule, model, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
