"""Classification with functions: train, evaluate, main."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 20, generator=generator)
    targets = (inputs.sum(dim=1) > 0).long()
    return TensorDataset(inputs, targets)


def train_one_epoch(model, loader, optimizer, epoch, rank):
    model.train()
    loader.sampler.set_epoch(epoch)  # place: epoch
    total = torch.zeros(2)
    for step, (inputs, targets) in enumerate(loader):  # place: loop step
        optimizer.zero_grad()  # place: step step
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()  # place: loss step
        optimizer.step()  # place: update step
        total += torch.tensor([loss.item(), 1.0])
    dist.all_reduce(total)  # place: collective
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = torch.zeros(2)
    for inputs, targets in loader:
        correct[0] += (model(inputs).argmax(dim=1) == targets).sum()
        correct[1] += len(targets)
    dist.all_reduce(correct)
    return (correct[0] / correct[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_data, test_data = make_data(96 * world_size, 0), make_data(32 * world_size, 1)
    sampler = DistributedSampler(train_data)
    train_loader = DataLoader(train_data, args.batch_size, sampler=sampler)  # place: sampler
    test_sampler = DistributedSampler(test_data, shuffle=False)
    test_loader = DataLoader(test_data, args.batch_size, sampler=test_sampler)
    for epoch in range(args.epochs):
        loss = train_one_epoch(model, train_loader, optimizer, epoch, rank)
        accuracy = evaluate(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
