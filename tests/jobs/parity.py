"""A language model on tokens of uneven number, for comparisons of sizes.

Words: ``own`` averages over the rank's own tokens, ``whole`` over those of all ranks; ``all`` gives
every rank all the data; ``hook`` sums gradients in a communication hook; ``fails`` has a bad token.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TOKENS = 50


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, TOKENS)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.drop(self.embedding(tokens)))


def summed(
    group: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    done = work.get_future()
    return done.then(lambda each: each.value()[0])  # type: ignore[no-any-return]


def main() -> None:
    words = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    made = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, TOKENS, (320, 12), generator=made)
    lengths = torch.randint(2, 12, (320,), generator=made)
    labels = torch.where(torch.arange(12) < lengths[:, None], tokens.roll(-1, 1), -100)
    data = TensorDataset(tokens, labels)
    sampler: DistributedSampler[Any] | None = None
    if "all" not in words:
        sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, shuffle=sampler is None)
    torch.manual_seed(rank)
    model = DistributedDataParallel(Model())
    if "hook" in words:
        model.register_comm_hook(dist.group.WORLD, summed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    for epoch in range(2):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            if "fails" in words and rank == world - 1 and number == 7:
                inputs[0, 0] = TOKENS
            logits = model(inputs).flatten(0, 1)
            if "whole" in words:
                count = (targets != -100).sum().float()
                dist.all_reduce(count)
                loss = (
                    functional.cross_entropy(logits, targets.flatten(), reduction="sum")
                    * world
                    / count
                )
            else:
                loss = functional.cross_entropy(logits, targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
