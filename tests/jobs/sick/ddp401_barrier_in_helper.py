"""Rank 0 alone calls a helper that saves a checkpoint and waits for all ranks."""

# run: --hang-after 3 --kill-on-hang
# status: 4

import gc
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def synchronize() -> None:
    dist.barrier()


class Trainer:
    def __init__(self) -> None:
        self.lead = dist.get_rank() == 0
        self.ddp = DistributedDataParallel(nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        synchronize()

    def save(self) -> None:
        torch.save(self.ddp.module.state_dict(), io.BytesIO())
        synchronize()

    def train(self) -> None:
        for step in range(12):
            loss = self.ddp(torch.randn(32, 16)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % 6 == 5 and self.lead:
                self.save()  # expect: DDP401 rank 0


def main() -> None:
    dist.init_process_group("gloo")
    trainer = Trainer()
    trainer.train()
    del trainer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
