"""Regression with a Trainer class that owns everything."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        point = torch.linspace(0, 1, 16) + index / self.size
        return point, point.sin().mean().unsqueeze(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x))


class Trainer:
    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.model = DistributedDataParallel(Net())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.criterion = nn.MSELoss()
        data = Waves(80 * self.world_size)
        self.sampler = DistributedSampler(data, seed=3)
        self.loader = DataLoader(data, batch_size=8, sampler=self.sampler)  # place: sampler
        self.global_step = 0

    @property
    def is_main(self):
        return self.rank == 0

    def training_step(self, batch):
        inputs, targets = batch
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.criterion(self.model(inputs), targets)
        loss.backward()  # place: loss self.global_step
        self.optimizer.step()  # place: update self.global_step
        return loss.detach()

    def mean(self, value):
        value = value.clone()
        dist.all_reduce(value)  # place: collective
        return value / self.world_size

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)  # place: epoch
            for batch in self.loader:  # place: loop self.global_step
                loss = self.training_step(batch)  # place: step self.global_step
                self.global_step += 1
            mean = self.mean(loss)
            if self.is_main:
                print(f"epoch {epoch} loss {mean.item():.4f}")


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    trainer = Trainer()
    trainer.fit(5)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
