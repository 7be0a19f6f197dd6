"""The generator is wrapped, and the critic that judges it is not."""

# fix: Make them part of the module that DDP wraps

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16) + 1)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    generator = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    )
    critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3)  # expect: DDP330 ranks 0,1
    torch.manual_seed(dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            fake = generator(torch.randn(len(real), 8))
            optimizer_c.zero_grad()
            score = critic(torch.cat([real, fake.detach()]))
            truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            nn.functional.binary_cross_entropy_with_logits(score, truth).backward()
            optimizer_c.step()
            optimizer_g.zero_grad()
            nn.functional.softplus(-critic(fake)).mean().backward()
            optimizer_g.step()
    del generator, critic, optimizer_g, optimizer_c
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
