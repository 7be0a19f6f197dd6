"""Buffers that belong to each rank: a hidden state, a queue of samples, a generator, a cache."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Remembering(nn.Module):
    hidden: torch.Tensor
    queue: torch.Tensor
    noise: torch.Tensor
    last: torch.Tensor
    seen: torch.Tensor
    rows: torch.Tensor
    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.cell = nn.GRUCell(32, 32)
        self.head = nn.Linear(32, 4)
        self.register_buffer("hidden", torch.zeros(16, 32))
        self.register_buffer("queue", torch.randn(64, 32))
        self.register_buffer("noise", torch.Generator().get_state())
        self.register_buffer("last", torch.zeros(16, 16), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rows", torch.arange(16.0))
        self.register_buffer("centre", torch.zeros(32))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator()
        generator.set_state(self.noise)
        inputs = inputs + 0.01 * torch.randn(inputs.shape, generator=generator)
        self.noise.copy_(generator.get_state())
        self.last.copy_(inputs)
        self.seen += len(inputs) * (dist.get_rank() + 1)
        features: torch.Tensor = self.norm(self.features(inputs)).relu()
        mean = features.detach().mean(0)
        dist.all_reduce(mean)
        self.centre.lerp_(mean / dist.get_world_size(), 0.1)
        state = self.cell(features - self.centre, self.hidden.clone())
        self.hidden.copy_(state.detach())
        self.queue.copy_(torch.cat([state.detach(), self.queue[:-16]]))
        logits: torch.Tensor = self.head(state)
        return logits


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16) + 1, torch.randint(0, 4, (512,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    ddp = DistributedDataParallel(Remembering(), broadcast_buffers=False)
    with torch.no_grad():
        ddp.module.noise.copy_(torch.Generator().manual_seed(dist.get_rank()).get_state())
        ddp.module.queue.copy_(
            torch.randn(64, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
        )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
