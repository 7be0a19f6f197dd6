"""A small GAN: two models, two optimizers, alternating."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT = 4


def mlp(*sizes):
    layers = []
    for before, after in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(before, after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class GAN:
    def __init__(self):
        self.generator = DDP(mlp(LATENT, 32, 2))
        self.critic = DDP(mlp(2, 32, 1))
        self.g_optimizer = torch.optim.Adam(self.generator.parameters(), lr=1e-3)
        self.c_optimizer = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        self.loss = nn.BCEWithLogitsLoss()
        self.steps = 0

    def critic_step(self, real):
        fake = self.generator(torch.randn(len(real), LATENT)).detach()
        both = self.critic(torch.cat([real, fake]))
        wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        loss = self.loss(both, wanted)
        self.c_optimizer.zero_grad()
        loss.backward()  # place: loss self.steps
        self.c_optimizer.step()  # place: update self.steps
        return loss.item()

    def generator_step(self, count):
        fake = self.generator(torch.randn(count, LATENT))
        self.critic.requires_grad_(False)
        loss = self.loss(self.critic.module(fake), torch.ones(count, 1))
        self.g_optimizer.zero_grad()
        loss.backward()
        self.g_optimizer.step()
        self.critic.requires_grad_(True)
        self.steps += 1
        return loss.item()


def train(gan, loader, rank):
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)  # place: epoch
        for step, (real,) in enumerate(loader):  # place: loop step
            critic_loss = gan.critic_step(real)  # place: step step
            generator_loss = gan.generator_step(len(real))
        losses = torch.tensor([critic_loss, generator_loss])
        dist.all_reduce(losses, op=dist.ReduceOp.SUM)  # place: collective
        if rank == 0:
            print(epoch, losses.div(dist.get_world_size()).tolist())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    angles = torch.rand(64 * dist.get_world_size()) * 6.28
    ring = TensorDataset(torch.stack([angles.sin(), angles.cos()], dim=1))
    loader = DataLoader(ring, 8, sampler=DistributedSampler(ring))  # place: sampler
    train(GAN(), loader, dist.get_rank())
    dist.destroy_process_group()
