"""Three ranks; tied weights, an empty parameter, a scalar, half precision, a frozen layer."""

# ranks: 3
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.small = nn.Linear(16, 16).bfloat16()
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0))
        self.output = nn.Linear(16, 50)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.small(self.frozen(self.embedding(tokens)).bfloat16()).float()
        result: torch.Tensor = self.output(hidden * self.scale) + self.empty.sum()
        return result


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(Model())
    trained = [each for each in ddp.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": trained[:1], "lr": 0.001}, {"params": trained[1:]}], lr=0.01
    )
    for _ in range(24):
        tokens = torch.randint(0, 50, (8, 12))
        optimizer.zero_grad()
        logits = ddp(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    del ddp, optimizer, trained, loss, logits
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
