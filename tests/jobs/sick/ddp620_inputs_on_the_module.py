"""A module keeps all inputs that it has seen."""

# fix: Keep the part that is needed

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 150


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        self.seen = torch.zeros(0, 256)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, inputs])  # expect: DDP620
        return self.layers(inputs)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    model = Net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for _ in range(STEPS):
        inputs, labels = torch.randn(512, 256), torch.randint(0, 10, (512,))
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del model, ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
