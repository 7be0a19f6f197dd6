"""The names of the checkpoint are changed, and strict."""

import gc
import os
import tempfile
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build(*names: str) -> nn.Sequential:
    layers = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    path = os.path.join(tempfile.gettempdir(), "pretrained.pt")
    if dist.get_rank() == 0:
        torch.save(build("layer1", "act", "layer2").state_dict(), path)
    dist.barrier()
    bare = build("stem", "act", "head")
    names = {"layer1": "stem", "layer2": "head"}
    state = torch.load(path)
    renamed = {names[k.split(".")[0]] + "." + k.split(".")[1]: v for k, v in state.items()}
    bare.load_state_dict(renamed)
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
