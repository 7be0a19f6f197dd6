"""A script without a single function."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
x = torch.randn(72 * dist.get_world_size(), 10)
y = x @ torch.randn(10, 1)
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=6, sampler=sampler)  # place: sampler
net = DDP(nn.Linear(10, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for epoch in range(5):
    sampler.set_epoch(epoch)  # place: epoch
    for i, (a, b) in enumerate(loader):  # place: loop i
        opt.zero_grad()  # place: step i
        loss = (net(a) - b).pow(2).mean()
        loss.backward()  # place: loss i
        opt.step()  # place: update i
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # place: collective
        if rank == 0 and i % 4 == 0:
            print(epoch, i, mean.item() / dist.get_world_size())
dist.destroy_process_group()
