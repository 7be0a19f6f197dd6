# ranks: 3
"""Train tied, empty, sparse and half-precision parameters on three ranks."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.extra = nn.Embedding(64, 16, sparse=True)
        self.nothing = nn.Parameter(torch.empty(0))
        self.low = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.decoder = nn.Linear(16, 64, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        x = (self.embedding(tokens) + self.extra(tokens)).mean(dim=1)
        x = self.low(x.bfloat16()).float() + self.nothing.sum()
        return self.decoder(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(Language())
    sparse = [model.module.extra.weight]
    dense = [p for p in model.parameters() if p is not sparse[0]]
    optimizer = torch.optim.SGD([{"params": dense}, {"params": sparse}], lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            tokens = (batch[:, :4].abs() * 20).long().clamp(max=63)
            loss = nn.functional.cross_entropy(model(tokens).float(), target)
            loss.backward()
            optimizer.step()
    del model, optimizer, loss, sparse, dense
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
