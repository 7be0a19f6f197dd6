"""A seeded split, with a transform around it, is sharded by a sampler."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, random_split


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, dataset: Dataset[tuple[torch.Tensor, ...]]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        features, label = self.dataset[index]
        return features + 0.1 * torch.randn(16), label


def main() -> None:
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(320, 16, generator=generator)
    labels = (features.sum(1) > 0).long()
    whole = TensorDataset(features, labels)
    train, _ = random_split(whole, [0.8, 0.2], torch.Generator().manual_seed(0))
    sampler = DistributedSampler(train)
    loader = DataLoader(Noisy(train), batch_size=16, sampler=sampler, num_workers=2)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
