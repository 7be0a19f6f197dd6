"""A hook is added in each step, and keeps its batch."""

# fix: Add the hook once

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

STEPS = 150


def watch(layer: nn.Module, inputs: torch.Tensor) -> RemovableHandle:
    def note(module: nn.Module, given: object, output: torch.Tensor) -> None:
        module.worst = (output.abs().max() - inputs.abs().max()).item()

    return layer.register_forward_hook(note)  # expect: DDP620


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for _ in range(STEPS):
        inputs, labels = torch.randn(512, 256), torch.randint(0, 10, (512,))
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch(ddp.module[0], inputs)
    del model, ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
