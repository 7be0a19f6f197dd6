"""A compiled DDP module with a graph break, activation checkpointing and two shapes of batches.

Prints what Dynamo counted: graphs, frames, and the reasons of graph breaks.
"""

from __future__ import annotations

import gc
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = checkpoint(self.first, batch, use_reentrant=False)
        # What depends on a value ends a graph.
        if hidden.sum().item() > 1e9:
            hidden = -hidden
        out: Tensor = self.second(hidden)
        return out


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net())
    compiled = torch.compile(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    total = torch.zeros(1)

    @torch.compile
    def square(values: Tensor) -> Tensor:
        return values.square().mean()

    for index in range(6):
        batch = torch.ones(4 if index < 3 else 5, 8)
        optimizer.zero_grad()
        loss: Any = square(compiled(batch))
        loss.backward()
        optimizer.step()
        total += loss.detach()
        dist.all_reduce(total)
    found = {name: dict(sorted(counters[name].items())) for name in ("frames", "graph_break")}
    found["stats"] = {"unique_graphs": counters["stats"]["unique_graphs"]}
    print(json.dumps(found), flush=True)
    print(f"loss {total.item():.9f}", flush=True)
    del ddp, compiled, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
