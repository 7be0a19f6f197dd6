"""Load parts with strict=False: a new head, a backbone alone, an adapter, shards, a second try."""

import copy
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())
        setattr(self, head, nn.Linear(32, 4))
        self.last = head

    def forward(self, batch):
        return getattr(self, self.last)(self.backbone(batch))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    trained = Net("classifier").state_dict()
    net = Net("head")
    # A new head, then the backbone alone from all of it.
    net.load_state_dict(trained, strict=False)
    backbone = {name.removeprefix("backbone."): each for name, each in trained.items()}
    net.backbone.load_state_dict(backbone, strict=False)
    # An adapter, and a checkpoint in two shards.
    net.load_state_dict({"head.bias": torch.zeros(4)}, strict=False)
    names = list(net.state_dict())
    for shard in (names[:3], names[3:]):
        net.load_state_dict({name: net.state_dict()[name] for name in shard}, strict=False)
    # Names that may have the wrapper's prefix: the second try fits.
    saved = {f"module.{name}": each for name, each in net.state_dict().items()}
    if net.load_state_dict(saved, strict=False).missing_keys:
        net.load_state_dict({name.removeprefix("module."): saved[name] for name in saved})
    average = copy.deepcopy(net)
    average.load_state_dict(net.state_dict(), strict=False)
    data = TensorDataset(torch.randn(128, 16), torch.randint(0, 4, (128,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), target).backward()
            optimizer.step()
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
