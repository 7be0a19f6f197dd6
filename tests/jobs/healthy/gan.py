"""Train a generator and a critic in turn, both with DDP."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))


class Critic(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    generator = DistributedDataParallel(Generator())
    critic = DistributedDataParallel(Critic())
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, _ in loader:
            fake = generator(torch.randn(len(batch), 8))
            critic_optimizer.zero_grad()
            (critic(fake.detach()).mean() - critic(batch).mean()).backward()
            critic_optimizer.step()

            generator_optimizer.zero_grad()
            score = -critic(fake).mean()
            score.backward()
            generator_optimizer.step()
    del generator, critic, generator_optimizer, critic_optimizer, fake, score
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
