"""The gradients are computed by autograd.grad and given to the parameters."""

# fix: Call backward() for the training loss

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
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            gradients = torch.autograd.grad(loss, parameters)  # expect: DDP322 ranks 0,1
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clamp(-1, 1)
            optimizer.step()
    del model, parameters, optimizer, loss, gradients, parameter, gradient
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
