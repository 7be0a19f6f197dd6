"""An auxiliary head that is trained in every tenth step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(20, 64)
        self.head = nn.Linear(64, 1)
        self.aux = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x, aux):
        h = self.body(x).relu()
        y = self.head(h)
        return (y, self.aux(h)) if aux else (y, None)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
net = DistributedDataParallel(Net(), find_unused_parameters=True)
opt = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.01)
for step in range(80):
    x = torch.randn(32, 20)
    y, a = net(x, step % 10 == 9)
    loss = (y.squeeze(1) - x.sum(1)).pow(2).mean()
    if a is not None:
        loss = loss + 0.1 * (a.squeeze(1) - x.mean(1)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.barrier()
dist.destroy_process_group()
