"""Every rank averages the weights."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    held = TensorDataset(torch.randn(128, 16), torch.randint(0, 4, (128,)))
    validation: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(
        held, batch_size=16, sampler=DistributedSampler(held, shuffle=False)
    )
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            average.update_parameters(model.module)
        average.eval()
        right = torch.zeros(2)
        with torch.no_grad():
            for inputs, labels in validation:
                right += torch.tensor([(average(inputs).argmax(1) == labels).sum(), len(labels)])
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"accuracy {right[0] / right[1]:.3f}")
    del model, average, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
