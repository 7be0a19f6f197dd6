"""Rank 0 evaluates averaged weights in place of the model's own, and puts those back."""

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
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(inputs), labels)
            loss.backward()
            optimizer.step()
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.1)
        if dist.get_rank() == 0:
            own = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(average)
            with torch.no_grad():
                model(data.tensors[0])
            model.load_state_dict(own)
    del ddp, optimizer, model, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
