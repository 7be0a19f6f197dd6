"""A tiny causal language model: autocast, clipping, a schedule, an iterable data set."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

VOCABULARY, LENGTH, WIDTH = 40, 12, 24


class Text(IterableDataset):
    def __init__(self, rank, world_size, documents):
        self.rank, self.world_size, self.documents = rank, world_size, documents

    def __iter__(self):
        for number in range(self.rank, self.documents, self.world_size):  # place: shard
            generator = torch.Generator().manual_seed(number)
            yield torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def learning_rate(step):
    return 0.5 * (1 + math.cos(math.pi * step / 60))


def train():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    model = DDP(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    loader = DataLoader(Text(rank, world_size, 4 * 48 * world_size), batch_size=4)
    for step, tokens in enumerate(loader):  # place: loop step
        optimizer.zero_grad(set_to_none=True)  # place: step step
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()  # place: loss step
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # place: update step
        schedule.step()
        if step % 6 == 5:
            average = loss.detach().float().clone()
            dist.all_reduce(average)  # place: collective
            if rank == 0:
                print(f"step {step} loss {average.item() / world_size:.3f}", flush=True)


def main():
    dist.init_process_group("gloo")
    train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
