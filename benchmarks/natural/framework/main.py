"""Training by the small framework beside this file, with callbacks."""

import torch
import torch.distributed as dist
from engine import Callback, Engine
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MeanLoss(Callback):
    def __init__(self):
        self.losses = []

    def on_step_end(self, engine, loss):
        self.losses.append(loss.item())

    def on_epoch_end(self, engine):
        mean = torch.tensor(self.losses).mean()
        self.losses.clear()
        dist.all_reduce(mean)  # place: collective
        if engine.rank == 0:
            print(f"epoch {engine.epoch}: {mean.item() / dist.get_world_size():.4f}")


def compute_loss(model, batch):
    features, labels = batch
    return nn.functional.binary_cross_entropy_with_logits(model(features), labels)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    count = 88 * dist.get_world_size()
    data = TensorDataset(torch.randn(count, 14), torch.randint(2, (count, 1)).float())
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))  # place: sampler
    model = nn.Sequential(nn.Linear(14, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    Engine(model, optimizer, compute_loss, [MeanLoss()]).run(loader, epochs=5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
