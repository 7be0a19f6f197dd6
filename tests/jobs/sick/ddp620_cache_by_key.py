"""A cache whose keys never come back."""

# fix: Drop entries that are not needed

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 150


TARGETS: dict[str, torch.Tensor] = {}


@torch.no_grad()
def target(model: nn.Module, inputs: torch.Tensor, key: str) -> torch.Tensor:
    if key not in TARGETS:
        TARGETS[key] = model(inputs) @ torch.ones(10, 256)  # expect: DDP620
    return TARGETS[key]


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for step in range(STEPS):
        inputs, labels = torch.randn(512, 256), torch.randint(0, 10, (512,))
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        target(ddp.module, inputs, f"batch {step}")
    del model, ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
