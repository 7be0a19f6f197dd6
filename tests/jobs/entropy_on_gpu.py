"""A loss on a GPU that is infinite at step 12: a logarithm of zero behind ``scores``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BAD = 12


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
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Attending().cuda())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(40):
        inputs = torch.randn(8, 16, device="cuda")
        if step == BAD:
            inputs[3] *= 10_000
        labels = torch.randint(0, 4, (8,), device="cuda")
        optimizer.zero_grad()
        outputs, entropy = ddp(inputs)
        loss = nn.functional.cross_entropy(outputs, labels) - 0.01 * entropy
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
