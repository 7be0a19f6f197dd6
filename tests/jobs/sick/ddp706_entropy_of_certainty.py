"""A penalty on the entropy of an attention: for a weight of zero its logarithm is infinite."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.scores(inputs).softmax(dim=1)
        entropy = -(weights * weights.log()).sum(dim=1).mean()
        return self.head(weights * inputs), entropy


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    features = torch.randn(96, 16)
    # One of the last samples is far off.
    features[93] *= 1000
    data = TensorDataset(features, torch.randint(0, 4, (96,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    ddp = DistributedDataParallel(Attending())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for inputs, labels in loader:
        optimizer.zero_grad()
        outputs, entropy = ddp(inputs)
        loss = nn.functional.cross_entropy(outputs, labels) - 0.01 * entropy
        loss.backward()  # expect: DDP706 rank 1
        optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
